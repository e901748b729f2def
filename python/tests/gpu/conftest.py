# SPDX-License-Identifier: Apache-2.0
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # reference.py, test_hf.py


@pytest.fixture(autouse=True)
def no_gradients():
    import torch

    with torch.no_grad():
        yield
        torch.cuda.synchronize()  # what went wrong on the GPU shows in the test that did it
