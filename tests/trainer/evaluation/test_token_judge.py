"""Models of tokens are judged against counts, and one that sees what it has to predict is told."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from two_ranks import on_two_ranks

from tests.kinds import build_texts
from trainer.comm.launcher_env import RankFacts
from trainer.comm.world import World
from trainer.data.token_data import TokenData
from trainer.evaluation import token_baselines
from trainer.evaluation.gate import better_baselines
from trainer.evaluation.judge import JudgeRequest
from trainer.evaluation.shared_work import SharedWork
from trainer.evaluation.token_baselines import count_ends, count_tokens, judge_counts
from trainer.evaluation.token_blocks import independent_blocks
from trainer.evaluation.token_judge import TokenJudge, text_of
from trainer.model.task import SupervisedTask
from trainer.model.tokens import NextToken, generate_ids, gpt
from trainer.rundir import RunDir


@pytest.fixture
def data(tmp_path: Path) -> TokenData:
    return TokenData(build_texts(tmp_path).uri, tmp_path / "cache")


class Peeping(nn.Module):
    """A model that knows what comes next, as it looks at the whole piece."""

    def forward(self, ids: Tensor) -> Tensor:
        return 9.0 * nn.functional.one_hot(ids.roll(-1, 1), 256).float()


def judged(model: nn.Module, data: TokenData, folder: Path) -> dict[str, Any]:
    world = World(RankFacts(rank=0, world_size=1), torch.device("cpu"), "gloo")
    request = JudgeRequest(model=model, world=world, device=torch.device("cpu"), batch_size=8)
    judge = TokenJudge(SupervisedTask(NextToken(data.spec)), data, seed=1, is_likelihood=True)
    run_dir = RunDir(str(folder))
    run_dir.make()
    report = judge.report(request, run_dir, lambda stage: None)
    assert run_dir.read_json("evaluation.json")["model"] == report["model"]
    validation = judge.validate(request)
    assert validation.metrics["perplexity"] == pytest.approx(math.exp(validation.loss))
    return report


def test_counts_are_judged_as_the_formula_says(data: TokenData) -> None:
    single, pairs = count_tokens(data, SharedWork(), lambda: None)
    train = data.stream("train", 0, data.tokens("train"))
    assert pairs is not None
    assert np.array_equal(single, np.bincount(train, minlength=256))
    assert pairs.sum() == len(train) - 1
    assert pairs[ord("r"), ord("e")] == sum(1 for a, b in itertools.pairwise(train) if (a, b) == (114, 101))
    test = data.stream("test", 0, data.count("test") * data.spec.context + 1)
    plain = (single + 1) / (single.sum() + 256)
    expected = -np.mean([np.log((pairs[a, b] + plain[b]) / (pairs[a].sum() + 1)) for a, b in itertools.pairwise(test)])
    found = judge_counts(single, pairs, data, "test", SharedWork(), lambda: None)
    assert found["unigram"].mean() == pytest.approx(-np.log(plain[test[1:]]).mean())
    assert found["bigram"].mean() == pytest.approx(expected)
    assert found["unigram"][3] == pytest.approx(-np.log(plain[test[49:65]]).mean()), "of one piece"
    assert found["bigram"].mean() < found["unigram"].mean()


def test_counts_do_not_depend_on_ranks_or_chunks(data: TokenData, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of(work: SharedWork) -> tuple[Any, ...]:
        counts = count_tokens(data, work, lambda: None)
        judged = judge_counts(*counts, data, "test", work, lambda: None)
        return *counts, judged["unigram"], judged["bigram"], count_ends(data, "test", work)

    alone = all_of(SharedWork())
    assert alone[-1].sum() == (data.stream("test", 0, data.count("test") * data.spec.context) == 0).sum() > 0
    monkeypatch.setattr(token_baselines, "CHUNK", 777)
    for found in on_two_ranks(lambda world: all_of(SharedWork(world))):
        assert all(np.array_equal(one, other) for one, other in zip(found, alone, strict=True))


def test_a_model_is_judged_and_writes(data: TokenData, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gpt(data.spec, 256, width=16, heads=2, layers=1)
    report = judged(model, data, tmp_path / "run")
    assert report["model"]["perplexity"] == pytest.approx(math.exp(report["model"]["loss"]))
    per_byte = report["model"]["loss"] / math.log(2) * data.tokens("test") / data.manifest["units"]["test"]
    assert report["model"]["bits_per_byte"] == pytest.approx(per_byte)
    assert report["canaries"]["future_changed"]["passed"]
    assert any("is not below that of unigram and bigram" in note for note in report["notes"]), "it was not trained"
    for row in report["baselines"].values():
        assert row["model_gain"] == pytest.approx(row["loss"] - report["model"]["loss"], rel=1e-6)
        assert row["model_gain_t"] is None, "of few documents"
    [note] = [note for note in report["notes"] if "not tested for chance: " in note]
    assert "documents in the test split, and 20 are enough" in note
    assert not report["gate"]["passed"]
    assert len(report["sample"]["ids"]) == 400
    assert judged(model, data, tmp_path / "again")["sample"] == report["sample"], "the same seed"


def test_a_gain_is_tested_over_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TokenData(build_texts(tmp_path, test_fraction=0.7).uri, tmp_path / "cache")
    torch.manual_seed(0)
    model = gpt(data.spec, 256, width=16, heads=2, layers=1)
    report = judged(model, data, tmp_path / "run")
    [note] = [note for note in report["notes"] if "t-statistics are over the" in note]
    own = evaluated_pieces(model, data)
    counted = judge_counts(*count_tokens(data, SharedWork(), lambda: None), data, "test", SharedWork(), lambda: None)
    ends = count_ends(data, "test", SharedWork())
    document = np.concatenate([[0], np.cumsum(ends)[:-1]])
    assert f"over the {len(np.unique(document))} documents" in note
    for name, losses in counted.items():
        gain = losses - own
        sums = np.array([gain[document == each].sum() for each in np.unique(document)])
        sizes = np.array([(document == each).sum() for each in np.unique(document)])
        spread = ((sums - gain.mean() * sizes) ** 2).sum() * len(sums) / (len(sums) - 1)
        t = gain.sum() / spread**0.5
        assert report["baselines"][name]["model_gain_t"] == pytest.approx(t, rel=1e-4)
    assert better_baselines(report) == ["unigram", "bigram"], "it was not trained"


def evaluated_pieces(model: nn.Module, data: TokenData) -> np.ndarray:
    ids, following = data.gather("test", np.arange(data.count("test")))
    with torch.no_grad():
        return NextToken(data.spec)(model.eval()(ids), following).double().numpy()


MANIFEST: dict[str, Any] = {"end": 0, "source": {"documents": 400}, "params": {"test_fraction": 0.1}}


@pytest.mark.parametrize(
    ("change", "blocks", "note"),
    [
        ({}, 40, "over the 40 documents of the test split"),
        ({"ends": 19}, None, "not tested for chance: 19 documents in the test split, and 20 are enough"),
        ({"end": None}, 20, "over 20 stretches of the test split: of documents whose ends are not known"),
        ({"end": None, "source": {"documents": 199}}, None, "not tested for chance: too few documents"),
        ({"end": None, "source": {}}, None, "not tested for chance: too few documents"),
        ({"source": {"documents": 1}}, 20, "20 stretches of the test split: of this text, and say nothing of others"),
        ({"source": {"documents": 1}, "pieces": 19}, None, "fewer than 20 pieces"),
    ],
)
def test_blocks_are_documents_or_stretches_of_one_text(change: dict[str, Any], blocks: int | None, note: str) -> None:
    pieces, documents = change.pop("pieces", 120), change.pop("ends", 40)
    ends = np.zeros(pieces, dtype=np.int64)
    ends[np.linspace(0, pieces - 1, documents + 1).astype(int)[1:]] += 1
    found = independent_blocks({**MANIFEST, **change}, "test", ends)
    assert (None if found.block is None else len(np.unique(found.block))) == blocks
    assert note in found.note
    if found.block is not None:
        assert (np.diff(found.block) >= 0).all()
        assert np.bincount(found.block).min() >= 1


def test_a_model_that_sees_the_future_is_told(data: TokenData, tmp_path: Path) -> None:
    report = judged(Peeping(), data, tmp_path / "run")
    assert report["model"]["loss"] < report["baselines"]["bigram"]["loss"], "it looks excellent"
    assert not report["canaries"]["future_changed"]["passed"]
    assert any("its attention is not causal" in note for note in report["notes"])


def test_text_is_drawn_by_seed_and_shown_as_text(data: TokenData) -> None:
    torch.manual_seed(0)
    model = gpt(data.spec, 256, width=16, heads=2, layers=1)
    drawn = [generate_ids(model, [114], 30, data.spec.context, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert text_of([104, 105, 0, 195, 164, 255], 0) == "hi\nä\N{REPLACEMENT CHARACTER}"
