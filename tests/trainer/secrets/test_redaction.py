"""What is secret is struck out of texts and documents, and what is not stays as it is."""

from __future__ import annotations

import json

import pytest

from trainer.secrets import redaction
from trainer.secrets import resolve as secrets
from trainer.secrets.redaction import STRUCK, redact


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test resolves is no secret in the next."""
    monkeypatch.setattr(redaction, "_known", set())


@pytest.mark.parametrize(
    "text",
    [
        "https://user:PLANTED@host/x",
        "https://a.blob.core.windows.net/c/b?sv=1&sig=PLANTED%2Fc%3D&se=2",
        "https://a.azurewebsites.net/api/alert?code=PLANTED",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=PLANTED+/==;EndpointSuffix=x",
        "Endpoint=sb://x;SharedAccessKey=PLANTED=",
        "Authorization: Bearer PLANTED.eyJzdWIi.sig-_x",
        "password=PLANTED",
        "python train.py --hf-token PLANTED --epochs 3",
        "train.py --password 'PLANTED' -- --wandb-key PLANTED",
        '{"client_secret": "PLANTED"}',
        json.dumps({"body": json.dumps({"access_token": "PLANTED"})}),
        "DTRAIN_SCORING_TOKEN='PLANTED' is no reference",
    ],
)
def test_what_looks_like_a_credential_is_struck_out(text: str) -> None:
    struck = redact(text)
    assert "PLANTED" not in struck
    assert STRUCK in struck
    assert redact(struck) == struck


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:10000/devstoreaccount1: no host has a password here",
        "keyvault://vault-a/name and env:NAME are references",
        "az://container/jobs/train-1",
        "the key is under the mat, code=1, exit code: 137",
        "TOKENIZERS_PARALLELISM=false",
        "dtrain ui jobs --token env:NAME --port 1, dtrain launch -- train.py --tokenizer file.json --tokens 100",
        "give the option --token --and-more, or what-token you like",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert redact(text) == text


def test_documents_are_gone_through_by_name_and_by_looks() -> None:
    plain = {"sku": "Standard_NC6s_v3", "TOKENIZERS_PARALLELISM": "false", "nodes": 3, "token": "", "at": None}
    assert redact({**plain, "AZURE_CLIENT_SECRET": "x", "token": "y", "in": [{"urls": ("a?sig=z",)}]}) == {
        **plain,
        "AZURE_CLIENT_SECRET": STRUCK,
        "token": STRUCK,
        "in": [{"urls": [f"a?sig={STRUCK}"]}],
    }


def test_what_was_resolved_is_struck_out_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_X", "s3cret/with+signs")
    assert secrets.resolve("env:DTRAIN_X") == "s3cret/with+signs"
    document = {"a": ["slack://s3cret/with+signs", 1, None], "s3cret/with+signs": ("x?t=s3cret%2Fwith%2Bsigns",)}
    assert redact(document) == {"a": [f"slack://{STRUCK}", 1, None], STRUCK: [f"x?t={STRUCK}"]}


def test_a_secret_inside_another_leaves_nothing_of_the_longer_one() -> None:
    redaction.remember("abcdef")
    redaction.remember("abcdef-and-more")
    assert redact("x abcdef-and-more y") == f"x {STRUCK} y"


@pytest.mark.timeout(20)  # where some pattern takes the square of the length, it is minutes
@pytest.mark.parametrize(
    ("piece", "is_struck"),
    [
        *((piece, False) for piece in ("a", "token", "://a:", "bearer ", "-", "--token", '\\"secret')),
        *((piece, True) for piece in ("token=", "?code=", "sig='")),
    ],
)
def test_a_long_text_takes_no_time_to_speak_of(piece: str, is_struck: bool) -> None:
    text = piece * (400_000 // len(piece))
    assert (redact(text) != text, STRUCK in redact(text)) == (is_struck, is_struck)
