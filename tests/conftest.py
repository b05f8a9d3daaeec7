"""Models are loaded once for the whole run."""

import functools
import os
import signal

import helpers
import pytest
import torch
from helpers import WEIGHTS
from vocabularies import save_trained

from s2d import Tokenizer, load_model


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where random Llamas are put, such as cuda")


def pytest_configure(config):
    helpers.DEVICE = config.getoption("--device")
    if helpers.DEVICE == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # programs and ``load_model`` would take a GPU


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small models are faster on one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_is_heard():
    """By the programs that tests start too, even where this one runs in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def mini():
    """mini("mini-7b") -> the shipped model in float64."""
    return functools.cache(lambda name: load_model(WEIGHTS / name, "cpu", "float64"))


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(WEIGHTS / "mini-7b")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a tokenizer.json alone, of which tests change the configuration."""
    return save_trained(tmp_path_factory.mktemp("trained"))
