"""What several of these modules use."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """PyTorch on one core: the others have other tests, and every run adds in the same order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
