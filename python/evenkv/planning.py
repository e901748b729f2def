# SPDX-License-Identifier: Apache-2.0
"""Plans and explanations of decode batches; no tensors, no GPU.  Names are those of the command and its JSON
(docs/cli.md)."""

import ctypes
import dataclasses
import tempfile

import numpy as np

from . import _abi, _command, errors
from ._library import Plan as _Plan
from ._library import check, context, lib

_TILE_PARTIAL = 1  # EKV_TILE_PARTIAL
_DISPATCH_NAMES = {value: name for name, value in _abi.DISPATCHES.items()}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a planner makes of a batch.  Tokens are KV tokens of one head; a slot is room for one CTA (thread block):
    SMs x resident CTAs."""

    planner: str
    device: str
    batch: int  # requests
    dispatch: str  # grid, queue or range
    grid: tuple  # of the launch, x, y, z
    ctas: int
    split_kv: bool  # partial results are merged
    num_work_items: int  # (request, m_block, split)
    num_tiles: int
    kv_chunk_tokens: int | None  # tokens a split, where one number rules all
    num_splits: np.ndarray  # int32 [batch], the largest over a request's heads
    num_splits_bound: int | None  # fa3's static bound
    batch_order: np.ndarray  # int32 [batch], requests in the order in which they are visited
    max_cta_tokens: int  # of the busiest slot
    mean_cta_tokens: float  # over all slots
    imbalance: float  # max / mean
    workspace_bytes: int  # on the CPU backend
    warnings: tuple  # of str
    tiles: dict | None  # columns in dispatch order, as for pandas.DataFrame(plan.tiles); None unless asked for


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `evenkv explain --json` says (docs/cli.md), and as text what it prints."""

    device: str
    batch: int
    total_tokens: int
    tail: dict  # request, kv_len, share, stands_out
    sglang: dict  # which attention backend and planner SGLang takes, and why
    planners: list  # of dict, one a planner, as for pandas.DataFrame(explanation.planners)
    text: str = dataclasses.field(repr=False)

    def __str__(self):
        return self.text


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A simulated execution (docs/simulator.md has the model and how far it is from measured times)."""

    planner: str
    device: str
    system: str  # whose kernels
    projected: bool  # on constants that nobody measured on such a device
    num_sms: int
    slots_per_sm: int  # CTAs that an SM holds at a time
    num_ctas: int
    num_tiles: int
    time_us: float  # of all of it
    launch_us: float  # before the first tile
    merge_us: float  # after the last tile
    sm_busy_share: float  # of SMs x time_us
    tail_us: float  # from the first SM without a tile until the end of the last tile
    tail_tile: int | None  # ends last
    tail_request: int | None
    tail_cause: str | None  # one of _abi.TAIL_CAUSES; None: there is hardly a tail
    kv_gb_per_s: float  # K and V once over time_us, 1e9 bytes/s
    imbalance: float  # as in Plan
    kv_bytes: int
    q_bytes: int
    o_bytes: int
    partial_bytes: int
    table_bytes: int
    events: dict | None  # columns, as for pandas.DataFrame(simulation.events); None unless asked for


def planners():
    """Names and one-line summaries of all planners, as a dict in the order of their listing."""
    names = {}
    while name := lib.ekv_planner_name(len(names)):
        names[name.decode()] = lib.ekv_planner_summary(name).decode()
    return names


def _device_dict(device):
    values = {name: getattr(device, name) for name, *_ in device._fields_ if name not in ("struct_size", "systems")}
    return values | {"name": device.name.decode(), "projected": bool(device.projected)}


def devices():
    """The built-in device models: a list of dicts with the fields of ekv_device (evenkv.h)."""
    found = []
    while name := lib.ekv_device_name(len(found)):
        device = _abi.Device()
        check(lib.ekv_device_find(name, device))
        found.append(_device_dict(device))
    return found


def find_device(device):
    """The struct of a device: a built-in name, "this" (this machine's CPU), or the text of a device file."""
    found = _abi.Device()
    if device == "this":
        check(lib.ekv_device_detect(context(), found))
    elif "=" in device:
        text = device.encode()
        check(lib.ekv_device_parse(text, len(text), b"device", found))
    else:
        check(lib.ekv_device_find(device.encode(), found))
    return found


def _lengths(kv_lens):
    lengths = np.asarray(kv_lens)
    if lengths.ndim != 1 or not lengths.size or lengths.dtype.kind not in "iu":
        raise errors.InvalidArgument(f"kv_lens is {lengths.dtype} of shape {lengths.shape}; it must be integers, "
                                     "[batch]")
    if lengths.min() < 0 or lengths.max() >= 2**31:
        raise errors.InvalidArgument(f"kv_lens reaches from {lengths.min()} to {lengths.max()}; KV tokens are 0 to "
                                     "2^31 - 1")
    return np.ascontiguousarray(lengths, np.int32)


_OPTION_NAMES = [name for name, *_ in _abi.PlanOptions._fields_ if name not in ("struct_size", "on_device", "cuda")]


def make_plan(kv_lens, planner, device, shape, options):
    """A library plan and its device.  shape: q_heads, kv_heads, head_dim, page_size, dtype, q_len; options: fields of
    ekv_plan_options."""
    lengths = _lengths(kv_lens)
    if shape["dtype"] not in _abi.DTYPES:
        raise errors.NotFound(f"dtype {shape['dtype']!r} is none of {', '.join(_abi.DTYPES)}")
    unknown = [name for name in options if name not in _OPTION_NAMES]
    if unknown:
        raise errors.InvalidArgument(f"{unknown[0]} is no option of planners; they are {', '.join(_OPTION_NAMES)}")
    if isinstance(options.get("dispatch"), str):
        if options["dispatch"] not in _abi.DISPATCHES:
            raise errors.NotFound(f"dispatch {options['dispatch']!r} is none of {', '.join(_abi.DISPATCHES)}")
        options = options | {"dispatch": _abi.DISPATCHES[options["dispatch"]]}
    kv_dtype = _abi.DTYPES[shape["dtype"]]
    batch = _abi.Batch(batch_size=lengths.size, kv_len=lengths.ctypes.data, q_heads=shape["q_heads"],
                       kv_heads=shape["kv_heads"], head_dim=shape["head_dim"], page_size=shape["page_size"],
                       q_len=shape["q_len"], q_dtype=min(kv_dtype, _abi.DTYPES["bf16"]), kv_dtype=kv_dtype)
    found = find_device(device)
    return _Plan(planner, batch, found, _abi.PlanOptions(**options), context()), found


def _columns(struct, count, get):
    """Arrays by the fields of a struct, of which get(i, pointer) fills the i-th."""
    rows = (struct * count)()
    size, address = ctypes.sizeof(struct), ctypes.addressof(rows)
    for i in range(count):
        check(get(i, struct.from_address(address + i * size)))
    array = np.ctypeslib.as_array(rows)
    return {name: array[name].copy() for name, *_ in struct._fields_}


def _tiles(plan, num_tiles):
    columns = _columns(_abi.Tile, num_tiles, lambda i, tile: lib.ekv_plan_tile_get(plan.handle, i, tile))
    return columns | {"partial": (columns.pop("flags") & _TILE_PARTIAL) != 0}


def plan(kv_lens, *, planner="even", device="h200", q_heads=32, kv_heads=4, head_dim=128, page_size=16, dtype="bf16",
         q_len=1, tiles=False, **options):
    """The plan of a planner for a batch.

    kv_lens: integers [batch], KV tokens of each request.
    planner: one of planners().
    device: name of a built-in model, "this" for this machine's CPU, or the text of a device file.
    q_heads, kv_heads, head_dim, page_size, dtype, q_len: the batch, by default that of qwen3-30b-a3b; dtype of K and
        V: fp32, fp16, bf16, fp8_e4m3, fp8_e5m2.
    tiles: list the tiles too.
    options: fields of ekv_plan_options (evenkv.h), as cuda_graph=1, resident_ctas=8, table_width=131072.

    Returns a Plan."""
    shape = dict(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype, q_len=q_len)
    made, found = make_plan(kv_lens, planner, device, shape, options)
    info = made.info()
    return Plan(planner=planner, device=found.name.decode(), batch=info.batch_size,
                dispatch=_DISPATCH_NAMES[info.dispatch], grid=tuple(info.grid), ctas=info.num_ctas,
                split_kv=bool(info.split_kv), num_work_items=info.num_work_items, num_tiles=info.num_tiles,
                kv_chunk_tokens=None if info.kv_chunk_tokens < 0 else info.kv_chunk_tokens,
                num_splits=np.array(info.num_splits[: info.batch_size], np.int32),
                num_splits_bound=None if info.num_splits_bound < 0 else info.num_splits_bound,
                batch_order=np.array(info.batch_order[: info.batch_size], np.int32),
                max_cta_tokens=info.max_cta_tokens, mean_cta_tokens=info.mean_cta_tokens, imbalance=info.imbalance,
                workspace_bytes=made.workspace_size(_abi.BACKEND_CPU),
                warnings=tuple(info.warnings[i].decode() for i in range(info.num_warnings)),
                tiles=_tiles(made, info.num_tiles) if tiles else None)


def systems():
    """Names of the systems whose kernels simulate has constants of."""
    names = []
    while name := lib.ekv_system_name(len(names)):
        names.append(name.decode())
    return names


def simulate(kv_lens, *, planner="even", device="h200", q_heads=32, kv_heads=4, head_dim=128, page_size=16,
             dtype="bf16", q_len=1, system=None, events=False, **options):
    """How long a plan would take on a device, by the simulator of docs/simulator.md.

    Arguments as plan's, and
    system: one of systems(), whose kernels run the tiles; None: the planner's own.
    events: keep when and where each tile ran.

    Returns a Simulation."""
    shape = dict(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype, q_len=q_len)
    known = systems()
    if system is not None and system not in known:
        raise errors.NotFound(f"system {system!r} is none of {', '.join(known)}")
    made, found = make_plan(kv_lens, planner, device, shape, options)
    wanted = _abi.SimOptions(system=-1 if system is None else known.index(system), events=events)
    timeline = ctypes.c_void_p()
    check(lib.ekv_simulate(made.handle, found, wanted, timeline))
    try:
        info = _abi.TimelineInfo()
        check(lib.ekv_timeline_info_get(timeline, info))
        kept = _columns(_abi.TimelineEvent, info.num_events,
                        lambda i, event: lib.ekv_timeline_event_get(timeline, i, event)) if events else None
    finally:
        lib.ekv_timeline_free(timeline)
    if events:
        tiles = _tiles(made, info.num_tiles)
        kept |= {name: tiles[name][kept["tile"]] for name in ("request", "head", "split", "kv_begin", "kv_end")}
    tail = _abi.Tile()
    if info.tail_tile >= 0:
        check(lib.ekv_plan_tile_get(made.handle, info.tail_tile, tail))
    copied = {field.name: getattr(info, field.name) for field in dataclasses.fields(Simulation)
              if hasattr(info, field.name)}
    return Simulation(**(copied | dict(
        planner=planner, device=found.name.decode(), system=info.system.decode(), projected=bool(info.projected),
        tail_tile=None if info.tail_tile < 0 else info.tail_tile,
        tail_request=None if info.tail_tile < 0 else tail.request, tail_cause=_abi.TAIL_CAUSES[info.tail_cause],
        events=kept)))


def explain(kv_lens, *, device="h200", q_heads=32, kv_heads=4, head_dim=128, page_size=16, dtype="bf16", q_len=1):
    """Which kernel a serving engine runs for a batch, where each system stops splitting, which request everybody waits
    for, and what even does instead.  Arguments as plan's, device by name or as the path of a device file.  Runs the
    evenkv command of this package.

    Returns an Explanation; print() shows it as text."""
    lengths = _lengths(kv_lens)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(",".join(map(str, lengths.tolist())) + "\n")
        file.flush()
        arguments = ["explain", "--kv-lens", f"@{file.name}", "--device", device, "--q-heads", str(q_heads),
                     "--kv-heads", str(kv_heads), "--head-dim", str(head_dim), "--page-size", str(page_size),
                     "--dtype", dtype, "--q-len", str(q_len)]  # fmt: skip
        [found] = _command.objects(arguments)
        text = _command.text(arguments)
    return Explanation(device=found["device"], batch=found["batch"], total_tokens=found["total_tokens"],
                       tail=found["tail"], sglang=found["sglang"], planners=found["planners"], text=text)
