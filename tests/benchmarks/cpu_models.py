"""Models of which a training step takes 50 to 500 ms on one core: what predictions are tried on.

Imported by the benchmarks beside it, not run. Each is a workload with random weights and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fxpart.capture.workload import Workload

BATCH = 8


def _ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length))


def _hugging(kind: str, configuration: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, configuration)(**options)
    config.use_cache = False
    model: nn.Module = getattr(transformers, kind)(config)
    return model.train()


def gpt2(rows: int = BATCH) -> Workload:
    """A GPT-2 of 8 layers, with tied embeddings and dropout."""
    model = _hugging(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=1024, n_positions=128, n_embd=256, n_layer=8,
        n_head=4,
    )  # fmt: skip
    tokens = _ids(rows, 64, 1024)
    return Workload(model, {"input_ids": tokens, "labels": tokens.clone()})


def llama(rows: int = BATCH) -> Workload:
    """A Llama of 6 layers: rotary positions, grouped queries, gated layers."""
    model = _hugging(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=2048, hidden_size=256, intermediate_size=688,
        num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    tokens = _ids(rows, 64, 2048)
    return Workload(model, {"input_ids": tokens, "labels": tokens.clone()})


def bert(rows: int = BATCH) -> Workload:
    """A BERT of 6 layers with a mask, trained on masked words."""
    model = _hugging(
        "BertForMaskedLM", "BertConfig", vocab_size=2048, hidden_size=256, num_hidden_layers=6,
        num_attention_heads=4, intermediate_size=1024, max_position_embeddings=128,
    )  # fmt: skip
    tokens = _ids(rows, 64, 2048)
    mask = torch.ones_like(tokens)
    mask[0, 48:] = 0
    return Workload(model, {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()})


def vit(rows: int = BATCH) -> Workload:
    """A vision transformer of 6 layers on 64 patches."""
    model = _hugging(
        "ViTForImageClassification", "ViTConfig", hidden_size=256, num_hidden_layers=6,
        num_attention_heads=4, intermediate_size=1024, image_size=64, patch_size=8, num_labels=100,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": _ids(rows, 1, 100)[:, 0]}
    return Workload(model, batch)


def resnet50(rows: int = BATCH) -> Workload:
    """ResNet-50 of half the width on 64 x 64 pixels."""
    from zoo_vision import ResNet50

    model = ResNet50(width=32, classes=100).train()
    batch = (torch.randn(rows, 3, 64, 64), _ids(rows, 1, 100)[:, 0])
    return Workload(model, batch, loss=functional.cross_entropy)


class Towers(nn.Module):
    """A recommender: bags of embeddings of user and item, deep towers, their product."""

    def __init__(self, items: int = 20000, width: int = 64, inner: int = 1024) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(items, width, mode="mean")
        self.user = nn.Embedding(5000, width)
        self.item = nn.Embedding(items, width)
        self.tags = nn.EmbeddingBag(500, width, mode="sum")
        self.left, self.right = self._tower(width, inner), self._tower(width, inner)

    @staticmethod
    def _tower(width: int, inner: int) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(2 * width, inner), nn.ReLU()]
        for _ in range(2):
            layers += [nn.Linear(inner, inner), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(inner, width))

    def forward(
        self, user: torch.Tensor, history: torch.Tensor, item: torch.Tensor, tags: torch.Tensor
    ) -> torch.Tensor:
        left = self.left(torch.cat([self.user(user), self.history(history)], 1))
        right = self.right(torch.cat([self.item(item), self.tags(tags)], 1))
        return (left * right).sum(1)


def recommender(rows: int = 512) -> Workload:
    """Two towers over embedding tables, many rows, few operations."""
    batch = {
        "user": torch.randint(0, 5000, (rows,)),
        "history": _ids(rows, 20, 20000),
        "item": torch.randint(0, 20000, (rows,)),
        "tags": _ids(rows, 5, 500),
        "target": torch.randint(0, 2, (rows,)).float(),
    }
    return Workload(Towers().train(), batch, loss=functional.binary_cross_entropy_with_logits)


class LargeTables(nn.Module):
    """Bags of ids from each of some large tables, and a tower over all their sums."""

    def __init__(self, tables: int, rows: int, width: int, inner: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(
                rows, width, mode="sum", sparse=True,
                _weight=torch.empty(rows, width).uniform_(-0.05, 0.05),
            )
            for _ in range(tables)
        )  # fmt: skip
        sizes = [tables * width, inner, inner, inner // 4]
        layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        self.tower = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n, tables, bag]; logits [n]."""
        bags = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        logits: torch.Tensor = self.tower(torch.cat(bags, 1)).squeeze(1)
        return logits


def large_tables(batch: int = 1024, rows: int = 2_500_000, bag: int = 20) -> Workload:
    """Eight tables of 20 million rows in all (1.3 GB), whose ids are drawn by rank^-1.1."""
    draw = torch.Generator().manual_seed(0)
    model = LargeTables(8, rows, 16, 1536)
    # The inverse of the integral of rank^-1.1 from 1 to the number of rows.
    uniform = torch.rand(batch, 8, bag, generator=draw, dtype=torch.float64)
    ids = (1 + uniform * (rows**-0.1 - 1)).pow(-10).long().clamp(1, rows) - 1
    # Common ids are apart in memory, as hashes of names are.
    ids = ids * 1_000_003 % rows
    clicks = torch.randint(0, 2, (batch,), generator=draw).float()
    loss = functional.binary_cross_entropy_with_logits
    return Workload(model.train(), (ids, clicks), loss=loss, optimizer="rowwiseadagrad")


def t5(rows: int = BATCH) -> Workload:
    """A T5 of 4 and 4 layers: two branches that meet."""
    model = _hugging(
        "T5ForConditionalGeneration", "T5Config", vocab_size=1024, d_model=256, d_kv=64, d_ff=1024,
        num_layers=4, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    batch = {"input_ids": _ids(rows, 64, 1024), "labels": _ids(rows, 48, 1024)}
    return Workload(model, batch)


_DECODER = {
    "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "max_position_embeddings": 128,
}  # fmt: skip


def mixtral(rows: int = BATCH) -> Workload:
    """A Mixtral of 4 layers of 4 experts."""
    model = _hugging(
        "MixtralForCausalLM", "MixtralConfig", intermediate_size=512, num_key_value_heads=4,
        num_local_experts=4, num_experts_per_tok=2, **_DECODER,
    )  # fmt: skip
    tokens = _ids(rows, 64, 1024)
    return Workload(model, {"input_ids": tokens, "labels": tokens.clone()})


def deepseek(rows: int = BATCH) -> Workload:
    """A DeepSeek-V3 of 4 layers: latent attention, a dense layer, then 8 experts and 2 shared."""
    model = _hugging(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", intermediate_size=688, num_key_value_heads=8,
        moe_intermediate_size=128, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3,
        n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=64,
        qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, **_DECODER,
    )  # fmt: skip
    tokens = _ids(rows, 64, 1024)
    return Workload(model, {"input_ids": tokens, "labels": tokens.clone()})


def unet(rows: int = BATCH) -> Workload:
    """A U-Net of three levels: results that skip all levels below."""
    from zoo_vision import UNet

    batch = (torch.randn(rows, 3, 32, 32), _ids(rows, 32 * 32, 2).view(rows, 32, 32))
    return Workload(UNet(width=32, depth=3).train(), batch, loss=functional.cross_entropy)


MODELS: dict[str, Callable[..., Workload]] = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "resnet50": resnet50,
    "recommender": recommender, "t5": t5, "mixtral": mixtral, "deepseek": deepseek, "unet": unet,
}  # fmt: skip


def build(name: str) -> Workload:
    """The workload of that name, the same every time."""
    torch.manual_seed(0)
    return MODELS[name]()
