"""Models are loaded once for the whole run."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, WEIGHTS, need_compiler
from vocabularies import save_trained

from s2d import Tokenizer, load_model
from s2d.bench.specbench import corpus_questions
from s2d.fast.costs import cache_folder
from s2d.trace.terminal import Streamed


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
    return functools.cache(lambda name: load_model(WEIGHTS / name, dtype="float64"))


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_users(tmp_path_factory):
    """What tests leave is kept apart from what the user's programs left; compiled code is not."""
    compiled = cache_folder() / "compiled"
    compiled.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        (cache_folder() / "compiled").symlink_to(compiled)
        yield


@pytest.fixture(scope="session")
def compiler():
    """What a test asks for that compiles."""
    need_compiler()


@pytest.fixture
def interrupt(monkeypatch):
    """interrupt(count) -> a list of the Steps shown; Ctrl-C is pressed when it has ``count``."""
    add, steps = Streamed.add, []

    def begin(count):
        def interrupted(self, step):
            add(self, step)
            steps.append(step)
            if len(steps) == count:
                raise KeyboardInterrupt

        monkeypatch.setattr(Streamed, "add", interrupted)
        return steps

    return begin


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer(WEIGHTS / "mini-7b" / "tokenizer.model")


@pytest.fixture(scope="session")
def held_out_prompts(tokenizer):
    """held_out_prompts(2) -> two chat prompts of each group, which no training run has seen."""

    def prompts(per_group):
        questions = corpus_questions("held-out", per_group)
        return [tokenizer.encode_chat(question["turns"][:1]) for question in questions]

    return prompts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a tokenizer.json alone, of which tests change the configuration."""
    return save_trained(tmp_path_factory.mktemp("trained"))
