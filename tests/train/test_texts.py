"""Held-out text is never trained on."""

from __future__ import annotations

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn import TransformerConfig, WarmupCosine
from asyncpar.nn.optimizers import AdamW
from asyncpar.train import LanguageModel, TrainingConfig, evaluate, make_texts

CORPUS = np.arange(200, dtype=np.uint8)


def test_the_last_part_of_the_text_is_held_out() -> None:
    texts = make_texts(CORPUS, rows=4, length=8, seed=0, held_out=0.25)
    assert texts.held_out is not None
    np.testing.assert_array_equal(texts.training.corpus, CORPUS[:150])
    np.testing.assert_array_equal(texts.held_out.corpus, CORPUS[150:])


def test_without_a_part_everything_is_trained_on() -> None:
    texts = make_texts(CORPUS, rows=4, length=8, seed=0, held_out=0.0)
    assert texts.held_out is None
    assert texts.training.corpus.size == 200


@pytest.mark.parametrize(("part", "message"), [(0.6, "held-out: expected a part in 0..0.5"), (0.01, "text: expected")])
def test_parts_that_make_no_sense_are_refused(part: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_texts(CORPUS, rows=4, length=8, seed=0, held_out=part)


def test_evaluation_is_the_same_every_time() -> None:
    config = TrainingConfig(
        model=TransformerConfig(length=8, features=8, layers=1, heads=1),
        rule=AdamW(beta2=0.95),
        schedule=WarmupCosine(peak=1e-3, steps=1),
        steps=1,
        rows=4,
    )
    texts = make_texts(CORPUS, rows=4, length=8, seed=0, held_out=0.25)
    assert texts.held_out is not None
    first = evaluate(LanguageModel(config), texts.held_out, count=2)
    assert first == evaluate(LanguageModel(config), texts.held_out, count=2)
    assert first == pytest.approx(np.log(256), rel=0.05)
