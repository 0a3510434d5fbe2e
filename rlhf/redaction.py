"""Keeps secrets out of what is shown and kept: log lines, errors, params, tags, artifacts.

A secret is the value of an environment variable whose name says so, such as HF_TOKEN; the password in a URI that any
variable holds; and what stands where a URI or an HTTP header has its password. It is found as it is, and as URIs, JSON,
HTML, YAML and Python write it.

Secrets belong into the environment, or into files that the libraries read by themselves; never into params, which are
written down everywhere: `rlhf.config` refuses them there.
"""

from __future__ import annotations

import html
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

MASK = "***"
SHORTEST = 6
"""Characters that a variable's value has at least to be masked: shorter ones are found inside ordinary words."""

SECRET_NAME = re.compile(r"(?:TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|AUTH_STRING|(?:^|_)KEY)$", re.IGNORECASE)
HARMLESS = ("RLHF_PARENT_RUN_KEY",)
"""Names that only sound so: a run's key is its name."""
IN_SCRIPTS = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&'"})
"""How JSON is written within a page's script."""
AND, QUOTE = r"(?:[?&]|&amp;|\\u0026)", r"(?:\\?['\"]|&quot;|&#(?:34|39|x27);)?"
"""What parts a query and what quotes a word, also as HTML and JSON write them."""
VALUE = r"(?:[^\s&'\"\\<]|\\(?!['\"]))+"
"""Up to what ends it: a quote that JSON has escaped ends it as well."""
PATTERNS = (
    re.compile(r"(?P<before>://[^\s/:@]*:)[^\s/]+(?=@)"),
    re.compile(rf"(?P<before>{AND}[\w-]*(?:password|token|secret|key|signature)=){VALUE}", re.IGNORECASE),
    re.compile(rf"(?P<before>authorization{QUOTE}\s*[:=]\s*{QUOTE}(?:basic|bearer)\s+){VALUE}", re.IGNORECASE),
)


def redact(text: str) -> str:
    """`text` with every secret in it replaced by `MASK`."""
    for _, value in sorted(_of_environment(), key=lambda found: -len(found[1])):
        text = text.replace(value, MASK)
    for pattern in PATTERNS:  # last: one that ends at a blank would leave the rest of a value that holds one
        text = pattern.sub(rf"\g<before>{MASK}", text)
    return text


def redact_bytes(content: bytes) -> bytes:
    """What a file holds, without secrets; one that is no text, for it holds a zero byte, is left as it is."""
    if b"\0" in content:
        return content
    return redact(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def redact_files(place: Path) -> None:
    """Takes the secrets out of a file, or out of all files of a directory."""
    for path in [place, *place.rglob("*")]:
        if path.is_file() and (clean := redact_bytes(content := path.read_bytes())) != content:
            path.write_bytes(clean)


def secret_in(text: str) -> str | None:
    """What secret `text` holds, in words that do not show it; None where it has none."""
    if any(pattern.search(text) for pattern in PATTERNS):
        return "a password"
    name = next((name for name, value in _of_environment() if value in text), None)
    return name and f"the secret in the environment variable {name}"


def redact_logs() -> None:
    """Has every log record of this process made without secrets, whoever logs it and wherever it goes."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def redacting(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit: the handler reports it
            return record
        if (clean := redact(message)) != message:
            record.msg, record.args = clean, ()
        if record.exc_info:  # a formatter takes the text that is there already
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return record

    redacting.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(redacting)


@contextmanager
def redacted_errors() -> Iterator[None]:
    """Whatever is raised inside, its messages hold no secret: for functions whose errors a server is told of."""
    try:
        yield
    except BaseException as error:
        link: BaseException | None = error
        while link is not None:
            link.args = tuple(redact(arg) if isinstance(arg, str) else arg for arg in link.args)
            link = link.__cause__ or link.__context__
        raise


def _of_environment() -> Iterator[tuple[str, str]]:
    """Name and secret value of the environment's variables, in every form in which it may be written."""
    for name, value in os.environ.items():
        for secret in _secrets(name, value):
            yield from ((name, form) for form in _forms(secret) if len(form) >= SHORTEST)


@cache
def _forms(secret: str) -> set[str]:
    """The text as it is, and as URIs, JSON, HTML, YAML and Python write it; JSON and HTML also within the other."""
    strings = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    plain = {secret, secret.replace("'", "''"), *strings}
    pages = {html.escape(text, quotes) for text in plain for quotes in (False, True)}
    pages |= {text.replace("&quot;", "&#34;").replace("&#x27;", "&#39;") for text in pages}  # as Jinja has it
    scripts = {text.translate(IN_SCRIPTS) for text in strings}
    within = {json.dumps(text, ensure_ascii=is_ascii)[1:-1] for text in pages | strings for is_ascii in (False, True)}
    return {*plain, *pages, *scripts, *within, quote(secret, safe=""), quote(secret), quote_plus(secret)}


def _secrets(name: str, value: str) -> Iterator[str]:
    if SECRET_NAME.search(name) and name not in HARMLESS:
        yield from (line.strip() for line in value.splitlines())  # logs come in lines, keys in several
        user, separator, password = value.partition(":")
        if separator and user and name.upper().endswith("AUTH_STRING"):
            yield password
    elif "://" in value and "@" in value:
        password = _password(value)
        yield from {password, unquote(password)}


def _password(uri: str) -> str:
    try:
        return urlsplit(uri).password or ""
    except ValueError:  # not a URI after all
        return ""
