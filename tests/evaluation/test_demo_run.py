import json

from relattn.evaluation.demo import run_demo

TINY = [
    "--config.num_steps=2",
    "--config.schedule.warmup_steps=0",
    "--config.model.dim=8",
    "--config.model.heads=2",
    "--config.model.num_layers=1",
    "--config.model.mlp_dim=8",
]


def test_demo_trains_compares_and_goes_on_where_it_was(tmp_path, capfd):
    table = run_demo(tmp_path, overrides=TINY)
    assert "| learnable_sincos | " in table
    assert "| constrained_sincos | " in table
    assert (tmp_path / "table.md").read_text() == table
    assert (tmp_path / "shift.png").read_bytes()[1:4] == b"PNG"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["constrained_sincos"]["one_class"]["num_images"] == [90] * 17
    assert "constrained_sincos, seed 0: " in capfd.readouterr().out
