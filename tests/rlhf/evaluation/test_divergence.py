"""KL between two tiny models, against sums over the vocabulary in float64, one state at a time."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel

from rlhf.evaluation import divergence
from rlhf.evaluation.accuracy import Graded
from rlhf.evaluation.divergence import (
    Pair,
    next_token_kl,
    places_with_most_kl,
    state_kls,
    summarise,
    tokens_with_most_kl,
)
from tests.tiny_models import ARCHITECTURES, random_tokens, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEMPERATURE = 0.7


def graded(prompt: list[int], tokens: list[int]) -> Graded:
    return Graded("how many?", "1", "", False, False, False, True, True, prompt, tokens, not tokens)


def answers() -> list[Graded]:
    """Six answers of different lengths; one prompt, the third, was too long."""
    lengths = [(2, 5), (6, 1), (0, 0), (3, 9), (1, 4), (4, 2)]
    prompts = random_tokens([prompt for prompt, _ in lengths], seed=1)
    written = random_tokens([response for _, response in lengths], seed=2)
    return [graded(*row) for row in zip(prompts, written, strict=True)]


def pair(architecture: str = "llama", **changes: object) -> Pair:
    policy, sft = tiny_model(architecture, seed=0), tiny_model(architecture, seed=1)
    values = {"policy": policy, "sft": sft, "tokenizer": TOKENIZER, "temperature": TEMPERATURE, "dtype": torch.float32}
    return Pair(**{**values, **changes})  # type: ignore[arg-type]


def probabilities(model: PreTrainedModel, tokens: list[int]) -> list[float]:
    """The next token's, in float64, without a batch and without padding."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([tokens])).logits[0, -1].tolist()
    weights = [math.exp(logit / TEMPERATURE) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


def naive_kls(both: Pair, answer: Graded) -> list[float]:
    found = []
    for place in range(len(answer.tokens)):
        state = answer.prompt + answer.tokens[:place]
        p, q = probabilities(both.policy, state), probabilities(both.sft, state)
        found.append(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_state_kls_are_the_sums_over_the_vocabulary(architecture: str) -> None:
    found = state_kls(pair(architecture), answers(), micro_batch_size=4)
    both = pair(architecture)
    for values, answer in zip(found, answers(), strict=True):
        assert values == pytest.approx(naive_kls(both, answer), rel=2e-5, abs=2e-6)
    assert max(map(max, filter(None, found))) > 0.1


def test_batches_and_chunks_change_nothing() -> None:
    both, rows = pair(), answers()
    alone = state_kls(both, rows, micro_batch_size=1)
    for size in (2, 100):
        for values, other in zip(state_kls(both, rows, size), alone, strict=True):
            assert values == pytest.approx(other, rel=1e-5, abs=1e-6)
    hidden = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    whole = next_token_kl(both.policy, both.sft, hidden[0], hidden[1], 1.0)
    torch.testing.assert_close(next_token_kl(both.policy, both.sft, hidden[0], hidden[1], 1.0, chunk=3), whole)


def test_no_logits_of_all_tokens_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both, sizes = pair(), []
    real = divergence.output_logits
    monkeypatch.setattr(divergence, "output_logits", lambda m, hidden: sizes.append(len(hidden)) or real(m, hidden))
    next_token_kl(both.policy, both.sft, torch.zeros(10, 16), torch.zeros(10, 16), 1.0, chunk=4)
    assert sizes == [4, 4, 4, 4, 2, 2]


def test_bfloat16_is_near_and_summed_in_float32() -> None:
    rows = answers()
    exact, rounded = (state_kls(pair(dtype=dtype), rows, 8) for dtype in (torch.float32, torch.bfloat16))
    for values, other in zip(rounded, exact, strict=True):
        assert values == pytest.approx(other, rel=0.2, abs=0.1)
    assert rounded != exact


def test_progress_counts_every_answer() -> None:
    done: list[int] = []
    state_kls(pair(), answers(), 2, on_rows=done.append)
    assert sum(done) == 6 and max(done) <= 2


def test_equal_models_have_no_kl_and_nothing_to_show() -> None:
    same = pair(sft=tiny_model(seed=0))
    found = summarise(same, answers(), state_kls(same, answers(), 3))
    assert (found.sequence, found.token, found.tokens, found.places) == (0, 0, [], [])


def test_a_summary_is_over_the_answers_that_are_there() -> None:
    kls = [[0.5, 0.25, 0.0, 0.25, 0.0], [2.0], [], *([0.1] * len(row.tokens) for row in answers()[3:])]
    found = summarise(pair(), answers(), kls)
    assert found.sequence == pytest.approx((1.0 + 2.0 + 0.9 + 0.4 + 0.2) / 5)
    assert found.token == pytest.approx(4.5 / 21, abs=1e-6)
    nothing = summarise(pair(), [graded([], [])], [[]])
    assert (nothing.sequence, nothing.token, nothing.tokens, nothing.places) == (0, 0, [], [])


def test_tokens_are_ordered_by_all_the_kl_of_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [graded([9], [7, 8, 7]), graded([9], [5, 7])]
    first, second, third = tokens_with_most_kl(TOKENIZER, rows, [[0.5, 1.0, 0.7], [0.2, 0.0]])
    assert (first.text, first.count, first.mean, first.share) == ("w7", 3, pytest.approx(0.4), pytest.approx(0.5))
    assert (second.text, second.count, second.mean) == ("w8", 1, 1.0)
    assert third.share == pytest.approx(0.2 / 2.4)
    monkeypatch.setattr(divergence, "TOKENS", 2)
    assert len(tokens_with_most_kl(TOKENIZER, rows, [[0.5, 1.0, 0.7], [0.2, 0.0]])) == 2


def test_places_show_the_token_its_neighbours_and_what_both_models_prefer() -> None:
    both = pair()
    rows = [graded([9, 4], [*range(2, 42), 45, 46]), graded([8], [45, 3])]
    kls = [[0.0] * 40 + [3.0, 0.0], [2.0, 0.5]]
    kls[0][1] = 1.0  # of token 3, whose other state has less
    first, second = places_with_most_kl(both, rows, kls)
    assert (first.token, first.kl, first.question) == ("w45", 3.0, "how many?")
    assert first.before == " ".join(f"w{token}" for token in range(2, 42))
    assert first.after == "w46"
    assert (second.token, second.kl, second.before) == ("w3", 1.0, "w2")
    assert second.after == " ".join(f"w{token}" for token in range(4, 12)) + "…"
    for model, shown in ((pair().policy, second.policy), (pair().sft, second.sft)):
        expected = sorted(enumerate(probabilities(model, [9, 4, 2])), key=lambda item: -item[1])[:3]
        assert [text for text, _ in shown] == [f"w{token}" for token, _ in expected]
        assert [share for _, share in shown] == pytest.approx([share for _, share in expected], rel=1e-4)


def test_the_context_before_a_place_is_cut() -> None:
    rows = [graded([9], [2] * (divergence.BEFORE + 1) + [45])]
    (place,) = places_with_most_kl(pair(), rows, [[0.0] * (divergence.BEFORE + 1) + [1.0]])
    assert place.before == "…" + " ".join(["w2"] * divergence.BEFORE)
