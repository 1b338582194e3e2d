"""Models of the zoo with Megatron-style annotations for one tensor axis, one line a weight.

Column weights are cut by their outputs, row weights by their inputs, embeddings and heads by the
vocabulary. Everything else follows by propagation.
"""

from __future__ import annotations

# fmt: off
TENSOR: dict[str, dict[str, str]] = {
    "gpt2": {
        "transformer.wte.weight": "tp:S(0)",
        "transformer.h.*.attn.c_attn.weight": "tp:S(1,3)",  # transposed; query, key and value fused
        "transformer.h.*.attn.c_attn.bias": "tp:S(0,3)",
        "transformer.h.*.attn.c_proj.weight": "tp:S(0)",
        "transformer.h.*.mlp.c_fc.weight": "tp:S(1)",
        "transformer.h.*.mlp.c_fc.bias": "tp:S(0)",
        "transformer.h.*.mlp.c_proj.weight": "tp:S(0)",
    },
    "llama": {
        "model.embed_tokens.weight": "tp:S(0)",
        "model.layers.*.self_attn.[qkv]_proj.weight": "tp:S(0)",
        "model.layers.*.self_attn.o_proj.weight": "tp:S(1)",
        "model.layers.*.mlp.gate_proj.weight": "tp:S(0)",
        "model.layers.*.mlp.up_proj.weight": "tp:S(0)",
        "model.layers.*.mlp.down_proj.weight": "tp:S(1)",
        "lm_head.weight": "tp:S(0)",
    },
    "bert": {
        "bert.embeddings.word_embeddings.weight": "tp:S(0)",
        "bert.encoder.layer.*.attention.self.*.weight": "tp:S(0)",
        "bert.encoder.layer.*.attention.self.*.bias": "tp:S(0)",
        "bert.encoder.layer.*.attention.output.dense.weight": "tp:S(1)",
        "bert.encoder.layer.*.intermediate.dense.weight": "tp:S(0)",
        "bert.encoder.layer.*.intermediate.dense.bias": "tp:S(0)",
        "bert.encoder.layer.[0-9].output.dense.weight": "tp:S(1)",
        "cls.predictions.bias": "tp:S(0)",
    },
    "vit": {
        "vit.layers.*.attention.[qkv]_proj.weight": "tp:S(0)",
        "vit.layers.*.attention.[qkv]_proj.bias": "tp:S(0)",
        "vit.layers.*.attention.o_proj.weight": "tp:S(1)",
        "vit.layers.*.mlp.fc1.weight": "tp:S(0)",
        "vit.layers.*.mlp.fc1.bias": "tp:S(0)",
        "vit.layers.*.mlp.fc2.weight": "tp:S(1)",
        "classifier.weight": "tp:S(0)",
        "classifier.bias": "tp:S(0)",
    },
    "t5": {
        "shared.weight": "tp:S(0)",
        "*Attention.[qkv].weight": "tp:S(0)",
        "*Attention.o.weight": "tp:S(1)",
        "*.relative_attention_bias.weight": "tp:S(1)",
        "*.wi.weight": "tp:S(0)",
        "*.wo.weight": "tp:S(1)",
    },
    "mixtral": {
        "model.embed_tokens.weight": "tp:S(0)",
        "model.layers.*.self_attn.[qkv]_proj.weight": "tp:S(0)",
        "model.layers.*.self_attn.o_proj.weight": "tp:S(1)",
        "model.layers.*.mlp.experts.gate_up_proj": "tp:S(0)",  # whole experts on each rank
        "model.layers.*.mlp.experts.down_proj": "tp:S(0)",
        "lm_head.weight": "tp:S(0)",
    },
    "resnet50": {
        "layer*.conv1.weight": "tp:S(0)",
        "layer*.conv2.weight": "tp:S(1)",
        "layer*.conv3.weight": "tp:S(0)",
        "fc.weight": "tp:S(1)",
    },
    "recommender": {
        "user.weight": "tp:S(0)",
        "item.weight": "tp:S(0)",
        "history.weight": "tp:S(0)",
        "tags.weight": "tp:S(1)",
        "left.0.weight": "tp:S(0)",
        "left.0.bias": "tp:S(0)",
        "left.2.weight": "tp:S(1)",
        "right.0.weight": "tp:S(0)",
        "right.0.bias": "tp:S(0)",
        "right.2.weight": "tp:S(1)",
    },
}
# fmt: on

# How the ranks share the work, and whether that takes the annotations above.
WAYS: dict[str, dict[str, int | str]] = {
    "data 2": {"mesh": "dp=2", "stages": 1},
    "tensor 2": {"mesh": "tp=2", "stages": 1},
    "data 2 x tensor 2": {"mesh": "dp=2,tp=2", "stages": 1},
    "pipeline 2 x tensor 2": {"mesh": "tp=2", "stages": 2},
    "pipeline 2 x data 2": {"mesh": "dp=2", "stages": 2},
    "zero 1 x 2": {"mesh": "dp=2", "stages": 1, "zero": 1},
    "zero 2 x 2": {"mesh": "dp=2", "stages": 1, "zero": 2},
    "zero 3 x 2": {"mesh": "dp=2", "stages": 1, "zero": 3},
}
