"""A model, a tokenizer and prompts for TRL's trainers, random and tiny, made here: nothing is downloaded."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

WORDS = 64
PAD, EOS = 0, 1

COMMON = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "max_grad_norm": 0.0,
    "learning_rate": 1e-3,
}
"""Arguments of every trainer here."""


def recipe(number: int, replaced: dict[str, str]) -> str:
    """A Python block of docs/trl.md, with what this machine does not have replaced."""
    page = Path(__file__).parents[2] / "docs" / "trl.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)[number]
    for old, new in replaced.items():
        assert old in code, old
        code = code.replace(old, new)
    return str(code)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{number}": number for number in range(2, WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def saved_model(folder: Path) -> str:
    """Its path; the same weights each time."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        max_position_embeddings=256,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def prompts(count: int = 64) -> Dataset:
    rng = random.Random(0)
    return Dataset.from_dict({"prompt": [" ".join(_words(rng, rng.randrange(2, 20))) for _ in range(count)]})


def _words(rng: random.Random, count: int) -> list[str]:
    return [f"w{rng.randrange(2, WORDS)}" for _ in range(count)]


def length_reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text.split())) for text in completions]


class Gradients(TrainerCallback):
    """All parameters' gradients, flat, as the optimizer got them: one tensor for each step."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]))


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest relative distance of two runs' gradients, over the steps."""
    assert len(ours) == len(theirs) > 0
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


class VarlenOnCPU:
    """In the place of the flash attention kernel that AsyncGRPOTrainer downloads: the same function, segment by
    segment."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *_: Any,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert causal
        assert window_size == (-1, -1)
        out = []
        for q, k, v in zip(
            query.split(cu_seqlens_q.diff().tolist()),
            key.split(cu_seqlens_k.diff().tolist()),
            value.split(cu_seqlens_k.diff().tolist()),
            strict=True,
        ):
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))  # the last query sees every key
            heads = (one.transpose(0, 1)[None] for one in (q, k, v))
            attended = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)
