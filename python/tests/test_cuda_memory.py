# SPDX-License-Identifier: Apache-2.0
"""evenkv._cuda against a driver that is none: what is called in which order, and what happens without memory."""

import gc

import pytest

from evenkv import _cuda, errors


class Driver:
    """Functions of libcuda that note their calls; the first `failures` allocations fail."""

    def __init__(self, failures=0, result=_cuda._OUT_OF_MEMORY):
        self.calls, self.failures, self.result = [], failures, result

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append(name)
            if name == "cuMemAlloc_v2":
                if self.failures:
                    self.failures -= 1
                    return self.result
                arguments[0]._obj.value = 4096
            if name == "cuMemFree_v2":
                assert arguments[0].value == 4096
            return 0

        return function


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(_cuda, "_driver", lambda: made)
    _cuda._primary_context.cache_clear()
    yield made
    _cuda._primary_context.cache_clear()


MODE = "cuThreadExchangeStreamCaptureMode"


def test_memory_lives_as_long_as_its_owner(driver):
    memory = _cuda.Memory(1000, 0, make_room=None)
    assert memory.address == 4096
    assert driver.calls[2:] == ["cuCtxPushCurrent_v2", MODE, "cuMemAlloc_v2", MODE, "cuCtxPopCurrent_v2"]
    driver.calls.clear()
    del memory
    gc.collect()
    assert driver.calls == ["cuCtxPushCurrent_v2", MODE, "cuMemFree_v2", MODE, "cuCtxPopCurrent_v2"]


@pytest.mark.parametrize("failures, result, error", [(1, 2, None), (2, 2, errors.OutOfMemory),
                                                     (1, 700, errors.EvenkvError)])
def test_a_second_try_after_making_room(driver, failures, result, error):
    driver.failures, driver.result = failures, result
    made = []
    if error:
        with pytest.raises(error, match=f"cuMemAlloc_v2 returned CUDA error {result}"):
            _cuda.Memory(1000, 0, lambda: made.append(1))
    else:
        assert _cuda.Memory(1000, 0, lambda: made.append(1)).address == 4096
    assert len(made) == (result == 2)
    assert driver.calls.count("cuCtxPushCurrent_v2") == driver.calls.count("cuCtxPopCurrent_v2")
    assert driver.calls.count(MODE) % 2 == 0
