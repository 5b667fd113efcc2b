"""`TokenJudge`: how a model of tokens is validated while it trains, and how it is reported on at the end.

Each token of a split but its first is predicted once, given what stands before it in its piece. Ranks take whole
batches, the same at any world size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.token_data import TokenData
from trainer.documents.events import FinishStage
from trainer.evaluation.evaluate import Evaluation
from trainer.evaluation.gate import gate_document
from trainer.evaluation.judge import JudgeRequest, evaluate_task
from trainer.evaluation.scores import blocked_t
from trainer.evaluation.shared_work import SharedWork
from trainer.evaluation.token_baselines import count_ends, count_tokens, judge_counts
from trainer.evaluation.token_blocks import TokenBlocks, independent_blocks
from trainer.model.task import Task
from trainer.model.tokens import generate_ids
from trainer.rundir import EVALUATION, RunDir
from trainer.spec import TOKENS

SAMPLE_TOKENS = 400
"""Tokens of the sample."""
PROMPT_TOKENS = 64
"""The most tokens of the test split that a sample begins with."""
TEMPERATURE = 0.8
"""Sharper than the model's own distribution: a sample is read by people."""
SEES = 1e-3
"""The share of the logits' size that they may change by rounding, where later tokens are changed."""


@dataclass(frozen=True, slots=True)
class TokenJudge:
    """Judges by loss per token, perplexity and bits per byte, against counts of single tokens and of pairs; with a
    sample of what the model writes."""

    task: Task
    data: TokenData
    seed: int
    is_likelihood: bool
    """Whether the loss is the stock one, of which perplexity and bits per byte are functions."""

    def validate(self, request: JudgeRequest) -> Evaluation:
        """Return the judgement on the validation split."""
        found = evaluate_task(self.task, self.data, "valid", request)
        more = self._figures(found.loss, "valid") if self.is_likelihood else {}
        return replace(found, metrics={**found.metrics, **more})

    def report(self, request: JudgeRequest, run_dir: RunDir, begin: Callable[[FinishStage], object]) -> dict[str, Any]:
        """Return the report on the test split, which rank 0 writes. Raise ValueError where the loss is not finite,
        before anything is written."""
        begin("test split")
        work, own = SharedWork(request.world), np.zeros(self.data.count("test"))
        found = evaluate_task(self.task, self.data, "test", request, own)
        if not math.isfinite(found.loss):
            raise ValueError(
                f"the loss on the test split is {found.loss}: lower training.learning_rate or training.clip_norm"
            )
        begin("baselines")
        own = work.sum(own)
        single, pairs = count_tokens(self.data, work, request.before_batch)
        judged = judge_counts(single, pairs, self.data, "test", work, request.before_batch)
        blocks = independent_blocks(self.data.manifest, "test", count_ends(self.data, "test", work))
        sample = self._sample(request)  # by all ranks, as a model may be divided among them
        sees = self._sees_the_future(request)
        begin("report")
        model: dict[str, Any] = {"loss": found.loss, "samples": found.samples}
        notes = []
        if self.is_likelihood:
            model |= self._figures(found.loss, "test")
            not_below = [name for name, losses in judged.items() if not found.loss < losses.mean()]
            if not_below:
                notes.append(f"the loss is not below that of {' and '.join(not_below)}: the model has gained nothing")
            notes.append(f"{blocks.note}.")
        if pairs is None:
            notes.append("pairs of tokens were not counted: the vocabulary is too large")
        if sees:
            notes.append(
                "what the model predicts changes with the tokens that come after: its attention is not causal, and "
                "its loss says nothing"
            )
        baselines = {
            name: {
                "loss": float(losses.mean()),
                **self._figures(float(losses.mean()), "test"),
                **(self._gain(losses - own, blocks) if self.is_likelihood else {}),
            }
            for name, losses in judged.items()
        }
        report: dict[str, Any] = {
            "kind": TOKENS, "split": "test", "model": model, "baselines": baselines,
            "canaries": {"future_changed": {"passed": not sees}}, "sample": sample, "notes": notes,
        }  # fmt: skip
        report["gate"] = gate_document(report)
        if request.world.rank == 0:
            run_dir.write_json(EVALUATION, report)
        request.world.barrier()
        return report

    def _figures(self, loss: float, split: str) -> dict[str, float]:
        """Return perplexity and, where it is known how many bytes the tokens stand for, bits per byte."""
        figures = {"perplexity": math.exp(min(loss, 700.0))}
        units = self.data.manifest["units"][split]
        if units:
            figures["bits_per_byte"] = loss / math.log(2) * self.data.tokens(split) / units
        return figures

    def _gain(self, gain: NDArray[np.float64], blocks: TokenBlocks) -> dict[str, float | None]:
        """Return by how much the model's loss per token is lower, and the t-statistic over independent blocks, from the
        gain on each piece (pieces,)."""
        t = None
        if blocks.block is not None:
            t = blocked_t(np.bincount(blocks.block, gain).astype(np.float64), np.bincount(blocks.block))
        return {"model_gain": float(gain.mean()), "model_gain_t": t}

    def _sample(self, request: JudgeRequest) -> dict[str, Any]:
        """Return what the model writes after the first tokens of the test split, the same for a seed."""
        spec = self.data.spec
        count = max(1, min(PROMPT_TOKENS, spec.context // 2, self.data.tokens("test")))
        prompt = self.data.stream("test", 0, count).tolist()
        was_training = request.model.training
        request.model.eval()
        ids = generate_ids(request.model, prompt, SAMPLE_TOKENS, spec.context, self.seed, TEMPERATURE)
        request.model.train(was_training)
        sample: dict[str, Any] = {"seed": self.seed, "temperature": TEMPERATURE, "prompt_ids": prompt, "ids": ids}
        if spec.encoding == "bytes":
            sample |= {"prompt": text_of(prompt, spec.end), "text": text_of(ids, spec.end)}
        return sample

    def _sees_the_future(self, request: JudgeRequest) -> bool:
        """Return whether logits change with ids that come after them. They may not."""
        spec = self.data.spec
        if spec.context < 2:
            return False
        half = spec.context // 2
        ids, _ = self.data.read("test", np.arange(1), request.device)
        changed = ids.clone()
        changed[:, half:] = (changed[:, half:] + 1) % spec.vocabulary
        was_training = request.model.training
        request.model.eval()
        with torch.no_grad():
            before, after = (request.model(given)[:, :half].float() for given in (ids, changed))
        request.model.train(was_training)
        return bool((before - after).abs().max() > SEES * before.abs().max().clamp(min=1e-6))


def text_of(ids: list[int], end: int | None) -> str:
    """Return the text of bytes, in which the end of a document is an empty line. Bytes that are no UTF-8 are shown as
    such."""
    return bytes(10 if number == end else number for number in ids).decode("utf-8", "replace")
