"""The verifier: every fault of reading answers seen elsewhere, and numbers that read back as themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.answers import canonical, extract_answer, has_single_final_answer, is_correct, read_number

GSM8K = Path(__file__).parents[4] / "shared" / "gsm8k"

READ = {
    "plain": [("#### 18", "18"), ("####18", "18"), ("#### 18\n", "18"), ("####\n18", "18"), ("a\nb\n#### 0", "0")],
    "punctuation": [
        ("#### 18.", "18"),
        ("#### 18,", "18"),
        ("#### 18!", "18"),
        ("#### (18)", "18"),
        ("#### '18'", "18"),
    ],
    "decimals": [("#### 18.00", "18"), ("#### .5", "0.5"), ("#### 0.50", "0.5"), ("#### 007", "7")],
    "currency": [
        ("#### $18.00", "18"),
        ("#### 18$", "18"),
        ("#### \u20ac5", "5"),
        ("#### 5 \u20ac", "5"),
        ("#### US$5", "5"),
        ("#### USD 5", "5"),
        ("#### 5 USD", "5"),
        ("#### \\$5", "5"),
        ("#### Rs. 500", "500"),
    ],
    "signs": [
        ("#### -5", "-5"),
        ("#### \u22125", "-5"),
        ("#### \u20135", "-5"),
        ("#### +5", "5"),
        ("#### - 5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### $\u22125", "-5"),
        ("#### minus 5", "-5"),
        ("#### **-5**", "-5"),
        ("#### -\u200b5", "-5"),
        ("#### -\u00a05", "-5"),
        ("#### x = -5", "-5"),
    ],
    "thousands": [
        ("#### 1,234", "1234"),
        ("#### 1 234", "1234"),
        ("#### 1\u2009234", "1234"),
        ("#### 1\u00a0234.5", "1234.5"),
        ("#### 1'234", "1234"),
        ("#### 1\u2019234\u2019567", "1234567"),
        ("#### 1{,}234", "1234"),
        ("#### 1,234,567.", "1234567"),
    ],
    "invisible": [("#### \u00a018", "18"), ("#### 1\u200b8", "18"), ("\ufeff#### 18", "18"), ("####\u202f18", "18")],
    "units": [("#### 18 dollars", "18"), ("#### 18kg", "18"), ("#### 5m", "5"), ("#### 18 m\u00b2", "18")],
    "percent": [("#### 50%", "50"), ("#### 50 %", "50"), ("#### 50\\%", "50"), ("#### \uff15\uff10\uff05", "50")],
    "fractions": [
        ("#### 3/4", "0.75"),
        ("#### 1/3", "1/3"),
        ("#### -1/3", "-1/3"),
        ("#### 1 1/2", "1.5"),
        ("#### \u00bd", "0.5"),
        ("#### 1\u00bd", "1.5"),
        ("#### -\u00bd", "-0.5"),
        ("#### 3\u20444", "0.75"),
        ("#### 6/3", "2"),
    ],
    "scientific": [("#### 1.5e3", "1500"), ("#### 2E-2", "0.02"), ("#### 1.5 x 10^3", "1500"), ("#### 1e40", "1e40")],
    "digits": [("#### \u0661\u0668", "18"), ("#### \uff11\uff18", "18"), ("#### \u0967\u096e", "18")],
    "latex": [
        ("#### \\boxed{18}", "18"),
        ("#### $\\frac{3}{4}$", "0.75"),
        ("#### 1\\frac{1}{2}", "1.5"),
        ("#### -\\dfrac{1}{2}", "-0.5"),
        ("#### \\boxed{\\text{18 apples}}", "18"),
        ("#### \\(18\\)", "18"),
    ],
    "markdown and tags": [
        ("#### **18**", "18"),
        ("#### __18__", "18"),
        ("#### <answer>18</answer>", "18"),
        ("#### -<b>5</b>", "-5"),
    ],
    "calculator": [
        ("#### <<3*6=18>>18", "18"),
        ("#### $<<3*6=18>>18", "18"),
        ("#### -$<<2+3=5>>5", "-5"),
        ("#### 3*6 = 18", "18"),
    ],
    "several markers": [("#### 18\n#### 19", "18"), ("#### 18 #### 19", "18"), ("##### 18", "18")],
    "run-on": [
        ("#### 18\nQuestion: Tom has 5", "18"),
        ("#### 18 Question: Tom has 5\n#### 5", "18"),
        ("#### 18<|im_end|>5", "18"),
        ("Question: a\n#### 18", "18"),
        ("#### 18\n\nQ: 7", "18"),
    ],
    "tail": [
        ("#### 18\n" + "and so on 7 " * 1000, "18"),
        ("#### 18. So it is", "18"),
        ("#### So, 18", "18"),
        ("#### => 18", "18"),
    ],
}

REFUSED = {
    "nothing": ["", "18", "####", "#### ", "#### none", "#### inf", "#### -", "### 18", "#### \u221e", "#### nan"],
    "separators": ["#### 1,2", "#### 1,23", "#### 1234,567", "#### 0,123", "#### 1,234,56", "#### 1.2.3", "#### 1 23"],
    "ranges and lists": [
        "#### 3-5",
        "#### 3 to 5",
        "#### 3, 4",
        "#### 3 or 4",
        "#### 3 4",
        "#### 3 and 4",
        "#### 3:30",
        "#### 5<br>600",
    ],
    "parts of others": ["#### x2", "#### 2^3", "#### 10\u00b2", "#### \u221a16", "#### 2x", "#### >18", "#### \u00b15"],
    "number words": ["#### 5 million", "#### 5k", "#### 5M", "#### 2 dozen", "#### 5-hundred"],
    "fractions": ["#### 3/0", "#### 1/2/3", "#### 1.5/2", "#### \\frac12", "#### 10/12/2020"],
    "size": ["#### " + "9" * 41, "#### 1e41", "#### 1e-41", "#### 1e400", "#### 1/" + "9" * 41, "#### 99e40"],
    "calculations": [
        "#### 3*6",
        "#### 18 = 3*6",
        "#### x >= 5",
        "#### 18<<3*6=18>>18",
        "#### -5 - 3",
        "#### 10 minus 5",
    ],
    "before the marker is cut": ["Tom has 5.\nQuestion: b\n#### 5"],
    "dots after letters": ["#### Rs.500", "#### No.5"],
}

FLEXIBLE = [
    ("The total is 10 + 8 = 18 dollars.", "18"),
    ("He has 18 apples and 5 pears.", "5"),
    ("#### no\nso 5", "5"),
    ("x = -5", "-5"),
    ("x=-5", "-5"),
    ("The answer is \\boxed{18}.", "18"),
    ("She has 1 234 apples", "1234"),
    ("It is 5.\nQuestion: 7", "5"),
    ("#### 18\nand 7", "18"),
    ("18\n\n", "18"),
    ("10-5", None),
    ("10 - 5", None),
    ("3 to 5", None),
    ("Total - 5", None),
    ("5 million", None),
    ("no", None),
    ("#### 3-5\n7", None),
    ("- 18 apples", "18"),
    ("In total, 18 apples", "18"),
    ("x > 18", None),
]


@pytest.mark.parametrize(("text", "value"), [pair for pairs in READ.values() for pair in pairs])
def test_reads_what_the_text_writes(text: str, value: str) -> None:
    number = extract_answer(text)
    assert number is not None
    assert Fraction(number) == (Fraction(value) if "/" in value else Fraction(Decimal(value)))
    assert canonical(number) == value


@pytest.mark.parametrize("text", [text for texts in REFUSED.values() for text in texts])
def test_refuses_what_is_no_single_number(text: str) -> None:
    assert extract_answer(text) is None


@pytest.mark.parametrize(("text", "value"), FLEXIBLE)
def test_flexible_falls_back_to_the_last_number(text: str, value: str | None) -> None:
    number = extract_answer(text, "flexible")
    assert (None if number is None else canonical(number)) == value


def test_correct_compares_values_and_not_strings() -> None:
    assert is_correct("#### $29.00", "29")
    assert is_correct("#### 1/2", "0.5")
    assert is_correct("#### 0.5", "1/2")
    assert not is_correct("#### 0.3333", "1/3")
    assert not is_correct("#### 29.01", "29")
    assert not is_correct("#### none", "29")
    assert not is_correct("#### 29", None)
    assert not is_correct("it is 29", "29")
    assert is_correct("it is 29", "29", "flexible")


@pytest.mark.parametrize(
    ("text", "single"),
    [
        ("Tom has 5.\n#### 5", True),
        ("#### 5\n", True),
        ("#### 5\n#### 5", False),
        ("#### 5 #### 5", False),
        ("#### 5\nand more", False),
        ("#### five", False),
        ("#### 5-6", False),
        ("5", False),
    ],
)
def test_single_final_answer(text: str, single: bool) -> None:
    assert has_single_final_answer(text) is single


WRITERS: dict[str, Callable[[int], str]] = {
    "plain": str,
    "comma": lambda n: f"{n:,}",
    "space": lambda n: f"{n:,}".replace(",", " "),
    "thin space": lambda n: f"{n:,}".replace(",", "\u2009"),
    "apostrophe": lambda n: f"{n:,}".replace(",", "'"),
    "dollar": lambda n: f"-${-n:,}" if n < 0 else f"${n:,}",
    "dollar before the sign": lambda n: f"${n}",
    "decimals": lambda n: f"{n}.00",
    "true minus": lambda n: str(n).replace("-", "\u2212"),
    "full width": lambda n: str(n).translate({ord("0") + i: chr(0xFF10 + i) for i in range(10)}),
    "unit": lambda n: f"{n} apples.",
    "percent": lambda n: f"{n}%",
    "bold": lambda n: f"**{n}**",
    "boxed": lambda n: f"$\\boxed{{{n}}}$",
    "scientific": lambda n: f"{n}e0",
    "fraction": lambda n: f"{3 * n}/3",
}


@given(st.integers(-(10**18), 10**18), st.sampled_from(sorted(WRITERS)))
def test_an_integer_reads_back_as_itself(number: int, way: str) -> None:
    text = f"Because.\n#### {WRITERS[way](number)}"
    assert extract_answer(text) == number
    assert extract_answer(text, "flexible") == number
    assert has_single_final_answer(text)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=6))
def test_a_decimal_reads_back_as_itself(number: Decimal) -> None:
    assert extract_answer(f"#### {number:f}") == number
    assert extract_answer(f"#### {number:,f} dollars") == number


@given(st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=10**6))
def test_a_fraction_reads_back_as_itself(number: Fraction) -> None:
    assert extract_answer(f"#### {number.numerator}/{number.denominator}") == number
    whole, rest = divmod(abs(number), 1)
    mixed = f"{'-' if number < 0 else ''}{whole} {rest.numerator}/{rest.denominator}"
    assert extract_answer(f"#### {mixed}") == number


@given(st.from_regex(r"-?[0-9]{1,40}(\.[0-9]{1,20})?(e-?[0-9]{1,2})?|-?[0-9]{1,40}/[0-9]{1,40}", fullmatch=True))
def test_canonical_text_reads_back_and_is_unique(text: str) -> None:
    number = read_number(text)
    if number is not None:
        again = read_number(canonical(number))
        assert again is not None
        assert Fraction(again) == Fraction(number)
        assert canonical(again) == canonical(number) == canonical(Fraction(number))


PIECES = st.sampled_from(
    [
        "####",
        "#",
        " ",
        "\n",
        "-",
        "\u2212",
        "$",
        ".",
        ",",
        "'",
        "/",
        "^",
        "e",
        "x",
        "10",
        "7",
        "{",
        "}",
        "\\frac",
        "\\boxed",
        "<<",
        ">>",
        "<",
        "=",
        "*",
        "_",
        "%",
        "\u00bd",
        "\u00b2",
        "\u0663",
        "\ud800",
        "\x00",
        "Question:",
        "minus ",
        "million",
    ]
)


@settings(max_examples=300)
@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
def test_no_text_raises_and_strict_implies_flexible(text: str) -> None:
    strict, flexible = extract_answer(text), extract_answer(text, "flexible")
    assert strict is None or strict == flexible
    has_single_final_answer(text)
    if flexible is not None:
        assert is_correct(f"#### {canonical(flexible)}", canonical(flexible))


@pytest.mark.parametrize(
    "unit", ["1", "#", "{", "\\frac{", "-", " ", "1 ", "1,", "<", "<<1", "*", "\u00bd", ". ", "Q", "\n"]
)
def test_a_megabyte_of_anything_is_read_in_linear_time(unit: str) -> None:
    """A quadratic reader would need hours here: that the test ends is what it shows."""
    text = unit * (1_000_000 // len(unit))
    for response in (text, f"#### {text}", f"#### -{text}5"):
        extract_answer(response, "flexible")
        has_single_final_answer(response)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the published GSM8K is not beside this checkout")
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_published_answer_is_right_by_the_verifier(split: str) -> None:
    answers = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").open(encoding="utf-8", newline="\n")]
    for answer in answers:
        gold = answer.rpartition("####")[2].strip().replace(",", "")
        assert is_correct(answer, gold), answer
        assert is_correct(answer, gold, "flexible"), answer
        assert has_single_final_answer(answer), answer
        assert not is_correct(answer, str(int(gold) + 1)), answer
