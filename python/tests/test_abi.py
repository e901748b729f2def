# SPDX-License-Identifier: Apache-2.0
"""The declarations of evenkv._abi against the C side (`evenkv info --abi`) and the header."""

import ctypes
import pathlib
import re

import pytest

from evenkv import _abi, _command, _library

HEADER = pathlib.Path(__file__).resolve().parents[2] / "include/evenkv/evenkv.h"


@pytest.fixture(scope="module")
def abi():
    [found] = _command.objects(["info", "--abi"])
    return found


@pytest.mark.parametrize("name", sorted(_abi.STRUCTS))
def test_struct_is_laid_out_as_in_c(abi, name):
    struct, c = _abi.STRUCTS[name], abi["structs"][name]
    assert ctypes.sizeof(struct) == c["size"]
    fields = [{"name": field, "offset": getattr(struct, field).offset, "size": getattr(struct, field).size}
              for field, *_ in struct._fields_]
    assert fields == c["fields"]
    if "initial" in c:
        assert bytes(struct()).hex() == c["initial"]


def test_no_struct_is_left_out(abi):
    assert set(abi["structs"]) == set(_abi.STRUCTS)


def test_the_header_declares_the_same_members(abi):
    """The C list itself could leave one out."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    declared = {match[2]: match[1] for match in re.finditer(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.DOTALL)}
    assert set(declared) == set(abi["structs"])
    for name, body in declared.items():
        members = []
        for statement in body.split(";"):
            function = re.search(r"\(\*(\w+)\)", statement)
            if function:
                members.append(function[1])
            elif statement.strip():
                members += [re.sub(r"\[.*|.*[ *]", "", part.strip()) for part in
                            re.sub(r"\[[^]]*\]", "", statement).strip().split(",")]
        assert members == [field["name"] for field in abi["structs"][name]["fields"]], name


def test_statuses_and_version(abi):
    assert abi["statuses"] == _abi.STATUSES
    assert abi["version"].encode() == _library.lib.ekv_version_string()


def test_enumerators_and_functions():
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    values = {name: int(value) for name, value in re.findall(r"(EKV_[A-Z0-9_]+) = (\d+)", text)}
    for prefix, names in (("DTYPE", _abi.DTYPES), ("LAYOUT", _abi.LAYOUTS), ("DISPATCH", _abi.DISPATCHES),
                          ("KERNEL", _abi.KERNELS)):
        for name, value in names.items():
            known = {"fp32": "F32", "fp16": "F16"}.get(name, name.upper())
            assert values[f"EKV_{prefix}_{known}"] == value
    assert (values["EKV_BACKEND_CPU"], values["EKV_BACKEND_CUDA"]) == (_abi.BACKEND_CPU, _abi.BACKEND_CUDA)
    assert sum(name.startswith("EKV_TAIL_") for name in values) == len(_abi.TAIL_CAUSES)
    assert values["EKV_MAX_SYSTEMS"] == _abi.MAX_SYSTEMS
    assert (values["EKV_LSE_NATURAL"], values["EKV_LSE_BASE2"]) == (_abi.LSE_NATURAL, _abi.LSE_BASE2)
    functions = dict(re.findall(r"EKV_API [^;(]*?(ekv_\w+)\(([^;]*)\);", text))
    assert set(functions) == set(_abi.STATUS_FUNCTIONS) | set(_abi.OTHER_FUNCTIONS)
    for name, parameters in functions.items():
        count = 0 if parameters == "void" else parameters.count(",") + 1
        declared = _abi.STATUS_FUNCTIONS.get(name)
        assert count == (len(declared) if declared is not None else len(_abi.OTHER_FUNCTIONS[name]) - 1), name
