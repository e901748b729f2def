# SPDX-License-Identifier: Apache-2.0
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a network for anything
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
