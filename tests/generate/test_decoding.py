"""Decoding over caches agrees with the whole model, for prompts of different lengths in one batch, and beyond the trained length."""

from typing import Any

import pytest
from ranks import RankPools

EXPERTS = {"moe.experts": 4, "moe.layers": [1, 3], "moe.ffn_width": 48}


def differences(changes: dict[str, Any]) -> dict[str, Any]:
    """Largest difference of logits between decoder and whole passes over the contexts, and what the sequences came to."""
    import torch
    from small_engine import small_config

    from train.decoding import Decoder, continue_sequences
    from train.engine import build as engine_build
    from train.engine import parallel

    config = small_config({"model.init_std": 0.3, **changes})
    ranks = parallel.build_ranks(config, parallel.init_process_group(120.0))
    # A decoder's model has its caches in use: whole passes are made by another one with the same weights.
    model, other = (engine_build.build_model(config, ranks, trainable=False)[0].eval() for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 120, (n,), generator=generator).tolist() for n in (40, 1, 63)]

    def whole(contexts: list[list[int]]) -> Any:
        with torch.no_grad():
            return torch.stack([other(torch.tensor([c]), torch.arange(len(c))[None])[0, -1, :120] for c in contexts])

    worst, lengths = 0.0, []
    with Decoder(model, config, prompts) as decoder:
        logits = decoder.start()
        # The longest prompt reaches the 96 tokens of a context after 33 steps.
        for step in range(37):
            if step % 6 == 0 or step > 31:
                torch.testing.assert_close(logits, whole(decoder.contexts), rtol=1e-3, atol=1e-4)
                worst = max(worst, float((logits - whole(decoder.contexts)).abs().max()))
            lengths.append(max(map(len, decoder.contexts)))
            logits = decoder.step(torch.randint(0, 120, (3,), generator=generator).tolist())
    settings: Any = {"tokens": 9, "end": -1, "temperature": 1.0, "seed": 5}
    together, speed = continue_sequences(model, config, prompts, **settings)
    alone = [continue_sequences(model, config, [prompt], **settings)[0][0] for prompt in prompts]
    ended, _ = continue_sequences(model, config, prompts, **{**settings, "end": together[0][42]})
    return {
        "worst": worst,
        "spread": float(logits.std()),
        "lengths": lengths,
        "same": together == alone,
        "stopped": len(ended[0]) <= 42,
        "counts": [len(sequence) for sequence in together],
        "speed": str(speed),
        "caches": [layer.cache for layer in decoder.layers],
    }


@pytest.mark.parametrize("changes", [{}, EXPERTS, {"attention.kind": "dense", "model.kv_heads": 4}])
def test_decoding_agrees_with_the_whole_model(changes: dict[str, Any], ranks: RankPools) -> None:
    (found,) = ranks(1).run(differences, changes)
    assert found["worst"] < 1e-4 < 0.1 < found["spread"]
    assert max(found["lengths"]) == 96
    assert found["lengths"][34] == 48
    assert found["same"]
    assert found["counts"] == [49, 10, 72]
    assert found["stopped"]
    assert found["speed"].startswith("prompt: 104 tokens in ")
    assert found["caches"] == [None] * 4
