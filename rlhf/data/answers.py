r"""Reading final answers: the one verifier behind reward, preference labels and evaluation.

A number is read as the exact value that it writes, or not at all: never silently another one. Policies:

- The text is normalised first: Unicode digits, minus signs, spaces, invisible characters, calculator annotations
  (`<<3*4=12>>`), tags and LaTeX wrappers (`\boxed{}`, `\frac{}{}`, `\text{}`, `\$`).
- Run-on text is cut where the next question or chat turn starts.
- `strict` reads the line after the first `####`, up to the end of its sentence and after its last `=`. Exactly one
  number may stand there; currency, units, percent, emphasis and punctuation around it do not matter.
- `flexible` is the same where a `####` line holds a digit, else it reads the last number of the text.
- Refused: lists, ranges, powers, ratios, dates, number words after digits (`5 million`), `1,2`, more than 40 digits,
  magnitudes beyond 10^40 either way.

Every function takes linear time and raises for no text.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Literal

Number = Decimal | Fraction
Method = Literal["strict", "flexible"]

MARKER = "####"
MAX_DIGITS = 40
MAX_EXPONENT = 40


def extract_answer(text: str, method: Method = "strict") -> Number | None:
    """The final number of a response, or None where there is none or where it is ambiguous."""
    text = _cut_run_on(_normalise(text))
    clause = _final_clause(text)
    if clause is not None and (first := _CLUSTER.search(clause)):
        return _read(clause, first.start())
    if method == "strict":
        return None
    return _last_number(text)


def is_correct(response: str, gold: str | None, method: Method = "strict") -> bool:
    """Whether the response's final number equals `gold`, the prepared column's text; never where gold is None."""
    if gold is None:
        return False
    answer = extract_answer(response, method)
    return answer is not None and answer == read_number(gold)


def has_single_final_answer(response: str) -> bool:
    """Whether the response holds exactly one `####`, with a readable number, as its last line."""
    text = _normalise(response).rstrip()
    markers = list(_MARKER.finditer(text))
    if len(markers) != 1 or "\n" in text[markers[0].end() :].lstrip():
        return False
    return extract_answer(response) is not None


@lru_cache(maxsize=65536)
def read_number(text: str) -> Number | None:
    """The number that `text` writes and nothing else decides; None where it holds none or several."""
    clause = _SPACES.sub(" ", _normalise(text)).strip()
    first = _CLUSTER.search(clause)
    return _read(clause, first.start()) if first else None


def canonical(number: Number) -> str:
    """The one text of a value: `72`, `-0.5`, `1e40`, or a reduced fraction `1/3`; `read_number` reads it back."""
    value = Fraction(number)
    if value.denominator == 1 and len(str(abs(value.numerator))) <= MAX_DIGITS:
        return str(value.numerator)
    decimal = _terminating(value)
    if decimal is None:
        return f"{value.numerator}/{value.denominator}"
    plain = f"{decimal:f}"
    if sum(c.isdigit() for c in plain) <= MAX_DIGITS:
        return plain
    sign, digits, _ = decimal.as_tuple()
    mantissa = f"{digits[0]}.{''.join(map(str, digits[1:]))}".rstrip(".")
    return f"{'-' if sign else ''}{mantissa}e{decimal.adjusted()}"


def _terminating(value: Fraction) -> Decimal | None:
    """`value` as a decimal without trailing zeros, if at most MAX_DIGITS significant digits write it exactly."""
    context = Context(prec=MAX_DIGITS)
    decimal = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    return context.normalize(decimal) if Fraction(decimal) == value else None


# Normalisation

_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2066\u2067\u2068\u2069\ufeff\u202a\u202b\u202c\u202d\u202e"
_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_FULL_WIDTH = {"\uff0e": ".", "\uff0c": ",", "\uff05": "%", "\uff04": "$", "\uff0b": "+", "\uff0f": "/", "\uff1d": "="}


def _translation() -> dict[int, str]:
    """Characters that write the same as an ASCII one, or nothing."""
    table = {ord(c): "" for c in _INVISIBLE} | {ord(c): "-" for c in _MINUS}
    table |= {ord(k): v for k, v in _FULL_WIDTH.items()} | {0xFF03: "#", 0x2044: "/", 0x2215: "/"}
    table |= {ord(c): "'" for c in "\u2018\u2019\u02bc\uff07"} | {0x2028: "\n", 0x2029: "\n", 0x85: "\n"}
    table |= {0x66B: ".", 0x66C: ","}
    for code in range(0x80, 0x20000):
        char = chr(code)
        category = unicodedata.category(char)
        if category == "Nd":
            table[code] = str(unicodedata.digit(char))
        elif category == "Zs":
            table[code] = " "
        elif unicodedata.decomposition(char).startswith("<fraction>") and char != "\u215f":
            table[code] = unicodedata.normalize("NFKD", char).replace("\u2044", "/")
    return table


_TRANSLATION = _translation()
_VULGAR = "".join(chr(code) for code, text in _TRANSLATION.items() if len(text) > 1)
_VULGAR_AFTER_DIGIT = re.compile(rf"(?<=\d)(?=[{_VULGAR}])")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_TAG = re.compile(r"</?[A-Za-z]+>")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac ?\{([0-9]+)\} ?\{([0-9]+)\}")
_LATEX_AFTER_DIGIT = re.compile(r"(?<=[0-9])(?=\\[dt]?frac)")
_LATEX_WRAPPER = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf|left|right)(?![A-Za-z])|\\[!()\[\]]")
_LATEX_SPACE = re.compile(r"\\[,;: ]|~")
_LATEX_SYMBOL = re.compile(r"\\([$%#&])")
_SPACES = re.compile(r"\s+")
_DIGIT = re.compile("[0-9]")


def _normalise(text: str) -> str:
    """`text` with one way to write digits, signs, spaces and line ends; annotations, tags and LaTeX wrappers gone."""
    if not text.isascii():
        text = _VULGAR_AFTER_DIGIT.sub(" ", text).translate(_TRANSLATION)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "<" in text:  # emphasis in their place: to join the digits around them would make another number
        text = _TAG.sub("*", _CALCULATOR.sub("*", text))
    if "=" in text:
        text = text.replace(">=", "\u2265").replace("<=", "\u2264").replace("!=", "\u2260").replace("=>", "=")
    if "\\" in text or "{" in text:
        text = _LATEX_AFTER_DIGIT.sub(" ", text.replace("{,}", ","))
        text = _LATEX_FRACTION.sub(r"\1/\2", text)
        text = _LATEX_SPACE.sub(" ", _LATEX_WRAPPER.sub("", _LATEX_SYMBOL.sub(r"\1", text)))
        text = text.replace("{", "").replace("}", "")
    return text


# Finding the clause that holds the answer

_MARKER = re.compile(r"#{4,}")
_RUN_ON = re.compile(
    r"(?<!\S)(?:#{1,3} ?)?\*{0,2}(?:Question|QUESTION|Problem|Q|Human|User|Instruction) ?[0-9]{0,3} ?\*{0,2}:"
    r"|<\|[A-Za-z_]{1,32}\|>"
)
_BULLET = re.compile(r"^ ?[-+] ")
_SENTENCE_END = re.compile(r"[.!?;](?= [^0-9 ]|$)")
# A number together with all that is joined to it; a search for it never fails late, so it takes linear time.
_CLUSTER = re.compile(r"\.?[0-9][^\s=]*(?: (?:(?:[-x\u00d7*\u00b7+/,&]|to|or|and) )?[-+]?\.?[0-9][^\s=]*)*")


def _cut_run_on(text: str) -> str:
    """`text` up to the next question or chat turn; one at the very start belongs to the response."""
    start = len(text) - len(text.lstrip())
    match = _RUN_ON.search(text, start + 1)
    return text[: match.start()] if match else text


def _final_clause(text: str) -> str | None:
    """What the line after the first marker says: its first sentence with a digit, from the last `=` on."""
    marker = _MARKER.search(text)
    if marker is None:
        return None
    line = _MARKER.split(text[marker.end() :].lstrip().partition("\n")[0], maxsplit=1)[0]
    line = _SPACES.sub(" ", line).strip()
    digit = _DIGIT.search(line)
    end = _SENTENCE_END.search(line, digit.start()) if digit else None
    return (line[: end.start()] if end else line).rpartition("=")[2].strip()


def _last_number(text: str) -> Number | None:
    """The last number of `text`; None where it is part of a range, a list or anything else that is refused."""
    last = max(text.rfind(digit) for digit in "0123456789")
    if last < 0:
        return None
    start = text.rfind("\n", 0, last) + 1
    line = _BULLET.sub("", _SPACES.sub(" ", text[start:].partition("\n")[0]))
    *_, cluster = _CLUSTER.finditer(line)
    return _read(line, cluster.start())


# Reading one number

_CURRENCY_SIGNS = "$" + "".join(c for c in map(chr, range(0x80, 0x10000)) if unicodedata.category(c) == "Sc")
_CURRENCY = re.compile(
    rf"(?:(?:\b(?:US|CA|AU|NZ|HK|A|C|S|R))?[{_CURRENCY_SIGNS}]|\b(?:USD|EUR|GBP|JPY|INR|CNY|CAD|AUD|CHF|Rs\.?))[ *_`]*$"
)
_SIGN_WORD = re.compile(r"\b(?:minus|negative) $", re.IGNORECASE)
_SIGN = re.compile(r"([-+])([ *_`]*)$")
_BEFORE_SPACED_SIGN = re.compile(r"(?:^|[:(=])[ *_`]*$")
_BEFORE_TIGHT_SIGN = re.compile(r"(?:^|[ *_`:(=])$")
_REFUSED_BEFORE = re.compile(r"[^\W_][*_`]*$|[.,]$|[<>\u2264\u2265\u2260\u00b1\u221a^/\\][*_` ]*$")
_REFUSED_AFTER = re.compile(
    r"[\^\u00b2\u00b3\u00b9\u2070-\u209c\u221a\u03c0]|(?:[kKMBx]|bn|mn)(?![A-Za-z])"
    r"|(?i:[ -]?(?:hundred|thousand|million|billion|trillion|dozen))"
)
_GROUPED = r"[1-9][0-9]{0,2}(?:(?:,[0-9]{3}){1,13}|(?: [0-9]{3}){1,13}|(?:'[0-9]{3}){1,13})(?![0-9])"
_INTEGER = rf"(?:{_GROUPED}|[0-9]{{1,{MAX_DIGITS + 1}}})"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]{{1,{MAX_DIGITS + 1}}})?|\.[0-9]{{1,{MAX_DIGITS + 1}}})"
_WHOLE = rf"(?:[1-9][0-9]{{0,2}}(?:,[0-9]{{3}}){{1,13}}|[0-9]{{1,{MAX_DIGITS + 1}}})"
_NUMBER = re.compile(
    rf"(?:(?P<whole>{_WHOLE}) )?(?P<numerator>{_WHOLE}) ?/ ?(?P<denominator>{_WHOLE})"
    rf"|(?P<mantissa>{_DECIMAL})(?:[eE](?P<e>[-+]?[0-9]{{1,4}})| ?[x\u00d7*\u00b7] ?10 ?\^ ?(?P<ten>[-+]?[0-9]{{1,4}}))"
    rf"|(?P<decimal>{_DECIMAL})"
)


def _read(clause: str, start: int) -> Number | None:
    """The number at `start` with the sign before it; None if anything beside it could change what is meant."""
    match = _NUMBER.match(clause, start)
    if match is None:
        return None
    rest = clause[match.end() :]
    if _DIGIT.search(rest) or _REFUSED_AFTER.match(rest):
        return None
    if clause[start] == "." and clause[start - 1 : start].isalnum():
        return None
    negative, value = _is_negative(clause[:start]), _value(match)
    if negative is None or value is None:
        return None
    if not negative:
        return value
    return value.copy_negate() if isinstance(value, Decimal) else -value


def _is_negative(before: str) -> bool | None:
    """Whether the text before a number negates it; None where it makes the number part of something else.

    A currency may stand on either side of the sign. A minus apart from its number is a sign only at the start.
    """
    before = _CURRENCY.sub("", before[-32:])
    if word := _SIGN_WORD.search(before):
        return None if _DIGIT.search(before[: word.start()][-2:]) else True
    sign = _SIGN.search(before)
    if sign is None:
        return None if _REFUSED_BEFORE.search(before) else False
    left = _CURRENCY.sub("", before[: sign.start()])
    allowed = _BEFORE_SPACED_SIGN if " " in sign[2] else _BEFORE_TIGHT_SIGN
    return sign[1] == "-" if allowed.search(left) else None


def _value(match: re.Match[str]) -> Number | None:
    """The unsigned value of a match; None beyond 40 digits, an exponent of 40, or with a denominator of 0."""
    parts = {name: re.sub("[ ,']", "", text) for name, text in match.groupdict().items() if text}
    if any(len(text.replace(".", "")) > MAX_DIGITS for text in parts.values()):
        return None
    if "numerator" in parts:
        denominator = int(parts["denominator"])
        if denominator == 0:
            return None
        value = int(parts.get("whole", 0)) + Fraction(int(parts["numerator"]), denominator)
        return value if max(len(str(value.numerator)), len(str(value.denominator))) <= MAX_DIGITS else None
    if "decimal" in parts:
        return Decimal(parts["decimal"])
    exponent = int(parts.get("e") or parts["ten"])
    if abs(exponent) > MAX_EXPONENT:
        return None
    number = Decimal(f"{parts['mantissa']}e{exponent}")
    return number if number.is_zero() or abs(number.adjusted()) <= MAX_EXPONENT else None
