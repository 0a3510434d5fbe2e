"""What somebody with transformers and MLflow, and none of our code, makes of our checkpoints.

python -I plain_libraries.py REQUEST ANSWER          both JSON files
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlflow
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


def answer(directory: str, questions: list[str], max_new_tokens: int) -> list[str]:
    """Greedy answers by the checkpoint's own generation settings, decoded as one batch padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory)
    chats = [[{"role": "user", "content": question}] for question in questions]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**batch, max_new_tokens=max_new_tokens)
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def tokenise(directory: str, pairs: list[list[str]]) -> list[list[int]]:
    """Token ids of questions with their whole responses."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = []
    for question, response in pairs:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        rows.append([*prompt, *tokenizer.encode(response + tokenizer.eos_token, add_special_tokens=False)])
    return rows


@torch.no_grad()
def score(directory: str, rows: list[list[int]], batch_size: int) -> list[float]:
    """Scores of token rows, padded as the checkpoint's tokenizer pads."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    scores: list[float] = []
    for start in range(0, len(rows), batch_size):
        batch = tokenizer.pad({"input_ids": rows[start : start + batch_size]}, return_tensors="pt")
        scores += model(**batch).logits[:, 0].tolist()
    return scores


def main(request: dict[str, Any]) -> dict[str, Any]:
    mlflow.set_tracking_uri(request["tracking_uri"])
    questions, length, rows = request["questions"], request["max_new_tokens"], request["rows"]
    return {
        "policy": answer(request["policy"], questions, length),
        "sft": answer(request["sft"], questions, length),
        "tokens": tokenise(request["policy"], request["pairs"]),
        "scores": score(request["reward"], rows, batch_size=len(rows)),
        "scores_alone": score(request["reward"], rows, batch_size=1),
        "ours": [name for name in sys.modules if name.partition(".")[0] in ("rlhf", "stages", "tasks", "flows")],
        # Last, for it brings the code that was registered with it.
        "served": [answer["text"] for answer in mlflow.pyfunc.load_model(request["model_uri"]).predict(questions)],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
