"""A planted secret stays out of whatever text, log record, error or param it gets into."""

from __future__ import annotations

import html
import io
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import yaml
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import escape
from mlflow import MlflowClient

from rlhf import anchors, config, redaction, tracking
from rlhf.errors import UsageError, UserError, run_command
from rlhf.redaction import MASK

SECRET = 'correct/horse <"battery\\staple"> & é'
QUOTED = "correct%2Fhorse%20%3C%22battery%5Cstaple%22%3E%20%26%20%C3%A9"
WRITERS = {
    "JSON": json.dumps,
    "JSON, not ASCII": partial(json.dumps, ensure_ascii=False),
    "JSON in JSON": lambda text: json.dumps(json.dumps(text)),
    "JSON in HTML": lambda text: html.escape(json.dumps(text)),
    "HTML in JSON": lambda text: json.dumps(html.escape(text)),
    "JSON in a script": htmlsafe_json_dumps,
    "HTML": html.escape,
    "HTML, quotes as they are": partial(html.escape, quote=False),
    "Jinja": escape,
    "Python": repr,
    "YAML": partial(yaml.safe_dump, allow_unicode=True),
    "path": quote,
    "query": quote_plus,
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return SECRET


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET", "my_key"]
)
def test_the_value_of_a_variable_with_a_telling_name_is_masked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert redaction.redact(f"tried {SECRET}!") == "tried ***!"
    assert redaction.redact(f"tried {QUOTED}!") == "tried ***!"


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
@pytest.mark.parametrize("secret", [SECRET, "it's a 'long' secret"])
def test_a_secret_is_masked_however_it_is_written(
    write: Callable[[str], str], secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", secret)
    text = str(write(f"Begin: {secret}!"))
    masked = redaction.redact(text)
    assert MASK in masked
    assert not [word for word in ("horse", "battery", "staple", "long", "secret") if word in masked]
    assert redaction.secret_in(text) == "the secret in the environment variable HF_TOKEN"


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "MONKEY", "TOKENIZERS_PARALLELISM", "RLHF_PARENT_RUN_KEY"])
def test_any_other_variable_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert redaction.redact(SECRET) == SECRET


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (
            "postgresql+psycopg2://ann:p@ss@db:5432/mlflow is down",
            "postgresql+psycopg2://ann:***@db:5432/mlflow is down",
        ),
        ("redis://:x@h", "redis://:***@h"),
        ("https://b/o?X-Amz-Signature=ab12&part=1", "https://b/o?X-Amz-Signature=***&part=1"),
        ("href='?part=1&amp;X-Amz-Signature=ab12'", "href='?part=1&amp;X-Amz-Signature=***'"),
        ("?part=1\\u0026token=ab12\\n", "?part=1\\u0026token=***"),
        ('"see \\"https://b/o?token=ab12\\""', '"see \\"https://b/o?token=***\\""'),
        ("<p>?token=ab12</p>", "<p>?token=***</p>"),
        ("{'Authorization': 'Basic YTpi'}", "{'Authorization': 'Basic ***'}"),
        (r'"{\"Authorization\": \"Bearer YTpi\"}"', r'"{\"Authorization\": \"Bearer ***\"}"'),
        ("{&#39;Authorization&#39;: &#39;Basic YTpi&#39;}", "{&#39;Authorization&#39;: &#39;Basic ***&#39;}"),
        ("postgresql://ann@db:5432/mlflow", "postgresql://ann@db:5432/mlflow"),
        ("hf://org/name@main and http://127.0.0.1:5000/", "hf://org/name@main and http://127.0.0.1:5000/"),
    ],
)
def test_what_stands_where_a_password_stands_is_masked(text: str, masked: str) -> None:
    assert redaction.redact(text) == masked


def test_a_password_in_a_variables_uri_is_masked_where_it_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ann:open%2Fsesame@mlflow.example")
    assert redaction.redact("login with open/sesame or open%2Fsesame") == "login with *** or ***"


def test_both_halves_of_prefects_log_in_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "admin:open sesame")
    assert redaction.redact("admin:open sesame; open sesame; admin") == "***; ***; admin"


def test_every_line_of_a_secret_file_is_masked_and_the_longer_of_two_secrets_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", "first line\nsecond line")
    monkeypatch.setenv("B_KEY", "second line and more")
    assert redaction.redact("got second line and more") == "got ***"
    assert redaction.redact("got second line") == "got ***"


def test_a_value_too_short_to_be_a_secret_leaves_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "true")
    assert redaction.redact("that is true") == "that is true"


def test_errors_and_tracebacks_hold_no_secret(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError(f"refused {planted}")

    monkeypatch.chdir(tmp_path)
    assert str(UserError(f"cannot log in with {planted}: try again")) == "cannot log in with ***: try again"
    assert run_command("x", broken) == 1
    assert "x: RuntimeError: refused ***: not expected" in capsys.readouterr().err
    log = (tmp_path / "runs" / "x-error.log").read_text()
    assert "RuntimeError: refused ***" in log
    assert planted not in log


def test_an_error_on_its_way_to_a_server_loses_the_secret_and_so_does_its_cause(planted: str) -> None:
    @redaction.redacted_errors()
    def broken() -> None:
        try:
            raise OSError(2, f"refused {planted}")
        except OSError as error:
            raise ValueError(f"cannot use {planted}", 3) from error

    with pytest.raises(ValueError) as raised:
        broken()
    assert raised.value.args == ("cannot use ***", 3)
    assert raised.value.__cause__ is not None
    assert raised.value.__cause__.args == (2, "refused ***")


def test_log_records_hold_no_secret_wherever_they_go(planted: str) -> None:
    logger, shown = logging.getLogger("planted"), io.StringIO()
    handler = logging.StreamHandler(shown)
    logger.addHandler(handler)
    before = logging.getLogRecordFactory()
    try:
        redaction.redact_logs()
        redaction.redact_logs()  # a second time changes nothing
        logger.warning("token %s of %d", planted, 2)
        logger.warning("plain %s", "words")
        logger.warning("given %r and %s", {"token": planted}, json.dumps([planted]))
        try:
            raise RuntimeError(planted)
        except RuntimeError:
            logger.exception("failed")
    finally:
        logging.setLogRecordFactory(before)
        logger.removeHandler(handler)
    beginning = "token *** of 2\nplain words\ngiven {'token': '***'} and [\"***\"]\nfailed\nTraceback"
    assert shown.getvalue().startswith(beginning)
    assert "staple" not in shown.getvalue()
    assert "RuntimeError: ***" in shown.getvalue()


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (
            ["prompt.system='say open sesame'"],
            "prompt.system: holds the secret in the environment variable HF_TOKEN, and",
        ),
        (["sft.source='https://ann:pw@host/model'"], "sft.source: holds a password, and"),
        (["ppo.sampling.stop=['open sesame']"], "ppo.sampling.stop: holds the secret in the environment variable HF_"),
    ],
)
def test_params_with_a_secret_are_refused_without_saying_it(
    overrides: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "open sesame")
    for refuse in (config.compose, config.load):
        with pytest.raises(UsageError) as raised:
            refuse(overrides)
        assert what in str(raised.value)
        assert "open sesame" not in str(raised.value)
        assert ":pw@" not in str(raised.value)


def test_a_run_holds_no_secret(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = []

    def failing() -> None:
        params = {"prompt": {"system": planted, "stop": [planted], "json": json.dumps(planted)}}
        with tracking.pipeline_run(params, {"overrides": f"x={planted}"}) as run:
            runs.append(run)
            run.set_tags({"note": planted, "html": html.escape(planted)})
            run.log_table(["token"], [[planted]], "table.json")
            run.log_text(f"diff with {planted}", "changes.diff")
            raise UserError(f"no log-in with {planted}")

    with pytest.raises(UserError):
        failing()
    client = MlflowClient(anchors.tracking_uri())
    kept = client.get_run(runs[0].id).data
    assert kept.params == {"prompt.system": "***", "prompt.stop": "['***']", "prompt.json": '"***"'}
    assert {name: kept.tags[name] for name in ("overrides", "note", "html", "error")} == {
        "overrides": "x=***",
        "note": "***",
        "html": "***",
        "error": "no log-in with ***",
    }
    assert [path.read_text() for path in tmp_path.rglob("changes.diff")] == ["diff with ***"]
    assert [json.loads(path.read_text())["data"] for path in tmp_path.rglob("table.json")] == [[["***"]]]
    assert b"staple" not in (tmp_path / "mlflow.db").read_bytes()


def test_nothing_secret_gets_into_mlflow_with_a_file(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is masked, in the journal already; the file itself, and one that is no text, stay as they are."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    files = {
        "changes.diff": f"+token = {planted}".encode() + b" \xe9\n",
        "docs/deep/page.html": b"<p>https://user:hunter22@host/</p>\r\n",
        "docs/form.html": f'<input value="{html.escape(planted)}">'.encode(),
        "settings.json": json.dumps({"token": planted}).encode(),
        "plain.txt": b"nothing\r\n",
        "weights": b"\0" + planted.encode(),
    }
    given = tmp_path / "given"
    for name, content in files.items():
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).write_bytes(content)
    with tracking.pipeline_run({}, {}) as run:
        run.log_artifact(given / "changes.diff")
        run.log_artifact(given)
        assert planted.encode() not in b"".join(path.read_bytes() for path in anchors.journal_dir().rglob("*.diff"))
    masked = files | {
        "changes.diff": b"+token = *** \xe9\n",
        "docs/deep/page.html": b"<p>https://user:***@host/</p>\r\n",
        "docs/form.html": b'<input value="***">',
        "settings.json": b'{"token": "***"}',
    }
    (kept,) = (tmp_path / "mlartifacts").glob("*/artifacts")
    found = {str(path.relative_to(kept)): path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    assert found == {"changes.diff": masked["changes.diff"]} | {f"given/{name}": text for name, text in masked.items()}
    assert {name: (given / name).read_bytes() for name in files} == files
