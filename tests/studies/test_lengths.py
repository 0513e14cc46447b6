"""The study of windows that are shorter or longer than in training."""

import importlib
import json

import jax
import numpy as np
import pytest

from relattn import training
from studies import lengths
from studies.lengths import lengths_table


def train(position, seed, folder, dim=4, num_seeds=1):
    get_config = importlib.import_module("configs.translution_gpt").get_config
    config = get_config("smoke,self_attention")
    with config.unlocked():
        config.update(num_steps=1, progress=False, eval_batch_size=512)
        config.update(seed=seed, num_seeds=num_seeds)
        config.model.update(
            dim=dim, num_heads=1, num_layers=1, mlp_dim=3, position=position
        )
        config.data.context_length = 13
    training.train_and_evaluate(config, folder, devices=jax.local_devices()[:1])
    return str(folder)


@pytest.mark.slow
def test_losses_of_windows_by_position(tmp_path, capsys):
    folders = [
        train("rope1d", 0, tmp_path / "a"),
        train("relative_bias", 0, tmp_path / "b"),
        train("rope1d", 1, tmp_path / "c"),
        train("rope1d", 1, tmp_path / "d", dim=6, num_seeds=2),
    ]
    options = ["--lengths", "7", "29", f"--output={tmp_path / 'out'}"]
    lengths.main(["--workdir", *folders, *options])
    results = json.loads((tmp_path / "out" / "lengths.json").read_text())
    rope, bias, wide = results["rows"]
    assert (rope["position"], rope["seeds"], rope["trained"]) == (
        "rope1d",
        [0, 1],
        [13, 13],
    )
    run = training.load_run(folders[2], context_length=29)
    expected = run.evaluate(split="validation")["loss"]
    assert rope["losses"][1][1] == pytest.approx(expected, rel=1e-5)
    # A table of offsets has no rows for a longer text.
    assert bias["losses"][0][1] is None
    mean, std = np.mean(rope["losses"], 0), np.std(rope["losses"], 0, ddof=1)
    cells = " | ".join(f"{m:.3f} ± {s:.3f}" for m, s in zip(mean, std, strict=True))
    table = lengths_table(results)
    # Runs of another size are not runs of another seed.
    assert f"| softmax | rope1d [a c] | {cells} |" in table
    # Seeds that were trained together count one by one.
    assert (wide["seeds"], wide["runs"]) == ([1, 2], ["d", "d"])
    run = training.load_run(folders[3], context_length=7, seed=2)
    expected = run.evaluate(split="validation")["loss"]
    assert wide["losses"][1][0] == pytest.approx(expected, rel=1e-5)
    assert "| softmax | rope1d [d] |" in table
    assert table.splitlines()[-2].endswith(" | – |")
    assert capsys.readouterr().out.endswith(table + "\n")
    assert (tmp_path / "out" / "lengths.png").stat().st_size > 1000
    with pytest.raises(SystemExit):
        lengths.main(["--workdir", folders[0], folders[0] + "/", *options])
    assert "is given twice: pass it once" in capsys.readouterr().err
