# SPDX-License-Identifier: Apache-2.0
"""The C ABI of libevenkv in ctypes: structs, enumerators and function prototypes of include/evenkv/evenkv.h.

ctypes, not cffi: it comes with Python, so that the wheel needs no compiled extension and fits every Python; and a
call costs about 1 us of the 15 that a decode may take on the host.  A struct starts with the values of its
EKV_..._INIT.  python/tests/test_abi.py compares all of it with the C side through `evenkv info --abi`."""

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p

# ekv_status
STATUSES = {
    "EKV_OK": 0,
    "EKV_ERROR_INVALID_ARGUMENT": -1,
    "EKV_ERROR_UNSUPPORTED": -2,
    "EKV_ERROR_OUT_OF_MEMORY": -3,
    "EKV_ERROR_OVERFLOW": -4,
    "EKV_ERROR_NOT_FOUND": -5,
    "EKV_ERROR_CAPACITY": -6,
    "EKV_ERROR_WORKSPACE_TOO_SMALL": -7,
    "EKV_ERROR_BACKEND_UNAVAILABLE": -8,
    "EKV_ERROR_DRIVER": -9,
    "EKV_ERROR_IO": -10,
    "EKV_ERROR_PARSE": -11,
    "EKV_ERROR_PLAN_INVALID": -12,
    "EKV_ERROR_BUSY": -13,
    "EKV_ERROR_SYSTEM": -14,
}

# ekv_dtype, by the command's names
DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4}
LAYOUTS = {"NHD": 0, "HND": 1}
DISPATCHES = {"default": 0, "grid": 1, "queue": 2, "range": 3}
TAIL_CAUSES = (None, "long tile", "split-made wave", "whole-tile wave", "uneven ranges")
MAX_SYSTEMS = 16
BACKEND_CPU, BACKEND_CUDA = 0, 1
LSE_NATURAL, LSE_BASE2 = 0, 1
KERNELS = {"auto": 0, "simt": 1, "mma": 2}


class _Struct(ctypes.Structure):
    """With the initial values of _initial, and its own size in struct_size."""

    _initial_ = {}

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self), **(self._initial_ | fields))


class ContextOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("alloc", c_void_p),
        ("free", c_void_p),
        ("alloc_user", c_void_p),
        ("log", c_void_p),
        ("log_user", c_void_p),
        ("num_threads", c_int32),
        ("cuda_device", c_int32),
    ]
    _initial_ = {"cuda_device": -1}


class SystemModel(ctypes.Structure):
    _fields_ = [
        ("cta_gb_per_s", c_double),
        ("sm_gb_per_s", c_double),
        ("total_gb_per_s", c_double),
        ("tile_us", c_double),
        ("launch_us", c_double),
        ("merge_us", c_double),
    ]


class Device(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char * 32),
        ("num_sms", c_int32),
        ("sm_arch", c_int32),
        ("ctas_per_sm", c_int32),
        ("request_cost_tokens", c_int32),
        ("read_gb_per_s_nominal", c_double),
        ("read_gb_per_s", c_double),
        ("bf16_tflops", c_double),
        ("l2_bytes", c_int64),
        ("memory_bytes", c_int64),
        ("projected", c_int32),
        ("systems", SystemModel * MAX_SYSTEMS),
    ]
    _initial_ = {"ctas_per_sm": 2, "projected": 1}


class Batch(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch_size", c_int32),
        ("kv_len", c_void_p),
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_size", c_int32),
        ("q_len", c_int32),
        ("q_dtype", c_int32),
        ("kv_dtype", c_int32),
        ("layout", c_int32),
        ("window_left", c_int32),
        ("soft_cap", c_float),
    ]
    _initial_ = {"page_size": 16, "q_len": 1, "q_dtype": 2, "kv_dtype": 2, "window_left": -1}


class PlanOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("cuda_graph", c_int32),
        ("resident_ctas", c_int32),
        ("no_sort", c_int32),
        ("no_pack_gqa", c_int32),
        ("table_width", c_int64),
        ("sm_margin", c_int32),
        ("ctas_per_sm", c_int32),
        ("heads_per_tile", c_int32),
        ("block_tokens", c_int32),
        ("request_cost", c_int32),
        ("snap_tokens", c_int32),
        ("least_share", c_int32),
        ("chunk_tokens", c_int32),
        ("dispatch", c_int32),
        ("max_total_tokens", c_int64),
        ("on_device", c_int32),
        ("cuda", c_int32),
    ]
    _initial_ = {"request_cost": -1, "snap_tokens": -1, "least_share": -1}


class Tile(ctypes.Structure):
    _fields_ = [
        ("request", c_int32),
        ("m_block", c_int32),
        ("split", c_int32),
        ("kv_begin", c_int32),
        ("kv_end", c_int32),
        ("slot", c_int32),
        ("head", ctypes.c_uint16),
        ("head_count", ctypes.c_uint16),
        ("flags", ctypes.c_uint32),
    ]


class PlanInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("planner", c_char_p),
        ("dispatch", c_int32),
        ("grid", c_int32 * 3),
        ("num_ctas", c_int64),
        ("resident_ctas", c_int32),
        ("split_kv", c_int32),
        ("num_work_items", c_int64),
        ("num_tiles", c_int64),
        ("num_partial_slots", c_int64),
        ("kv_chunk_tokens", c_int64),
        ("num_splits_bound", c_int32),
        ("batch_size", c_int32),
        ("num_splits", POINTER(c_int32)),
        ("batch_order", POINTER(c_int32)),
        ("total_tokens", c_int64),
        ("max_cta_tokens", c_int64),
        ("mean_cta_tokens", c_double),
        ("imbalance", c_double),
        ("num_warnings", c_int32),
        ("warnings", POINTER(c_char_p)),
    ]
    _initial_ = {"kv_chunk_tokens": -1, "num_splits_bound": -1}


class Tensors(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("q", c_void_p),
        ("q_stride_request", c_int64),
        ("q_stride_head", c_int64),
        ("k", c_void_p),
        ("k_stride_page", c_int64),
        ("k_stride_token", c_int64),
        ("k_stride_head", c_int64),
        ("v", c_void_p),
        ("v_stride_page", c_int64),
        ("v_stride_token", c_int64),
        ("v_stride_head", c_int64),
        ("o", c_void_p),
        ("o_stride_request", c_int64),
        ("o_stride_head", c_int64),
        ("lse", c_void_p),
        ("lse_stride_request", c_int64),
        ("lse_stride_head", c_int64),
        ("page_indptr", c_void_p),
        ("page_indices", c_void_p),
        ("last_page_len", c_void_p),
        ("block_table", c_void_p),
        ("block_table_rows", c_void_p),
        ("block_table_stride", c_int64),
        ("block_table_width", c_int32),
        ("num_pages", c_int64),
        ("kv_len", c_void_p),
        ("sm_scale", c_float),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("sinks", c_void_p),
    ]
    _initial_ = {"k_scale": 1.0, "v_scale": 1.0}


class DecodeOptions(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("kernel", c_int32),
        ("lse_base", c_int32),
        ("stream", c_void_p),
    ]


class MergeArgs(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("num_states", c_int32),
        ("rows", c_int64),
        ("head_dim", c_int32),
        ("part_dtype", c_int32),
        ("o_parts", c_void_p),
        ("part_stride_state", c_int64),
        ("part_stride_row", c_int64),
        ("lse_parts", c_void_p),
        ("lse_stride_state", c_int64),
        ("lse_stride_row", c_int64),
        ("o_dtype", c_int32),
        ("o", c_void_p),
        ("lse", c_void_p),
        ("lse_base", c_int32),
        ("stream", c_void_p),
    ]
    _initial_ = {"num_states": 1}


class SimOptions(_Struct):
    _fields_ = [("struct_size", c_size_t), ("system", c_int32), ("events", c_int32)]
    _initial_ = {"system": -1}


class TimelineInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("system", c_char_p),
        ("projected", c_int32),
        ("num_sms", c_int32),
        ("slots_per_sm", c_int32),
        ("num_ctas", c_int64),
        ("num_tiles", c_int64),
        ("num_events", c_int64),
        ("time_us", c_double),
        ("launch_us", c_double),
        ("merge_us", c_double),
        ("sm_busy_share", c_double),
        ("tail_us", c_double),
        ("tail_tile", c_int64),
        ("tail_cause", c_int32),
        ("kv_gb_per_s", c_double),
        ("imbalance", c_double),
        ("kv_bytes", c_int64),
        ("q_bytes", c_int64),
        ("o_bytes", c_int64),
        ("partial_bytes", c_int64),
        ("table_bytes", c_int64),
    ]


class TimelineEvent(ctypes.Structure):
    _fields_ = [("tile", c_int64), ("sm", c_int32), ("slot", c_int32), ("start_us", c_double), ("stop_us", c_double)]


STRUCTS = {
    "ekv_context_options": ContextOptions,
    "ekv_system_model": SystemModel,
    "ekv_device": Device,
    "ekv_batch": Batch,
    "ekv_plan_options": PlanOptions,
    "ekv_tile": Tile,
    "ekv_plan_info": PlanInfo,
    "ekv_tensors": Tensors,
    "ekv_decode_options": DecodeOptions,
    "ekv_merge_args": MergeArgs,
    "ekv_sim_options": SimOptions,
    "ekv_timeline_info": TimelineInfo,
    "ekv_timeline_event": TimelineEvent,
}

# Functions that return ekv_status, with their parameters; the others with their result first.
STATUS_FUNCTIONS = {
    "ekv_context_create": [POINTER(ContextOptions), POINTER(c_void_p)],
    "ekv_device_find": [c_char_p, POINTER(Device)],
    "ekv_device_parse": [c_char_p, c_size_t, c_char_p, POINTER(Device)],
    "ekv_device_detect": [c_void_p, POINTER(Device)],
    "ekv_plan_create": [c_void_p, c_char_p, POINTER(Batch), POINTER(Device), POINTER(PlanOptions), POINTER(c_void_p)],
    "ekv_plan_update": [c_void_p, c_void_p, c_int32],
    "ekv_plan_info_get": [c_void_p, POINTER(PlanInfo)],
    "ekv_plan_tile_get": [c_void_p, c_int64, POINTER(Tile)],
    "ekv_plan_cta_range": [c_void_p, c_int64, POINTER(c_int64), POINTER(c_int64)],
    "ekv_plan_check": [c_void_p],
    "ekv_workspace_size": [c_void_p, c_int32, POINTER(c_size_t)],
    "ekv_backend_supports": [c_void_p, POINTER(Tensors), POINTER(DecodeOptions)],
    "ekv_decode": [c_void_p, POINTER(Tensors), POINTER(DecodeOptions), c_void_p, c_size_t],
    "ekv_merge_states": [c_void_p, POINTER(MergeArgs)],
    "ekv_simulate": [c_void_p, POINTER(Device), POINTER(SimOptions), POINTER(c_void_p)],
    "ekv_timeline_info_get": [c_void_p, POINTER(TimelineInfo)],
    "ekv_timeline_event_get": [c_void_p, c_int64, POINTER(TimelineEvent)],
}
OTHER_FUNCTIONS = {
    "ekv_version_string": [c_char_p],
    "ekv_status_name": [c_char_p, c_int32],
    "ekv_status_text": [c_char_p, c_int32],
    "ekv_last_error": [c_char_p],
    "ekv_context_free": [None, c_void_p],
    "ekv_device_name": [c_char_p, c_int32],
    "ekv_device_text": [c_char_p, c_char_p],
    "ekv_planner_name": [c_char_p, c_int32],
    "ekv_planner_summary": [c_char_p, c_char_p],
    "ekv_plan_free": [None, c_void_p],
    "ekv_system_name": [c_char_p, c_int32],
    "ekv_timeline_free": [None, c_void_p],
}


def declare(library):
    """Gives the functions of a ctypes library their prototypes."""
    for name, parameters in STATUS_FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_int32, parameters
    for name, (result, *parameters) in OTHER_FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
