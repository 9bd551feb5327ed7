"""`coppice replay` with tiers: sizes as people write them, what is measured, and the advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coppice.frontend.commands.main import main
from coppice.frontend.replay.tiers import (
    Measured,
    TierOptions,
    encode_tier_sizes,
    plan_tiers,
)
from coppice.runtime.offline.tiers import TierSize


def test_sizes_are_tokens_or_bytes() -> None:
    plan = plan_tiers(TierOptions(host="1000, 64KB", disk="unlimited", token_bytes=64))
    assert plan is not None
    assert plan.sizes == ((TierSize("host", 1000),), (TierSize("disk", None),), ())
    assert plan.first == (TierSize("host", 1000), TierSize("disk", None))
    assert plan.combinations() == [
        (), (TierSize("disk", None),), (TierSize("host", 1000),), plan.first,
    ]  # fmt: skip
    assert plan_tiers(TierOptions()) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"disk": "some"}, "disk-cache must be a size such as 64GiB"),
        ({"host": "64GiB"}, "host-cache 64GiB: bytes need model or kv-bytes-per-token"),
        ({"disk": "1", "token_bytes": 0}, "kv-bytes-per-token must be at least 1, got 0"),
        ({"disk": "1", "token_bytes": 1, "model": "x"}, "must not be given with model"),
        ({"disk": "1", "prefill_rate": -1.0}, "prefill-rate must be above 0"),
        ({"disk": "1", "rates": {"disk": "fast"}}, "disk-rate must be a size"),
        ({"disk": "1", "rates": {"host": "1GB"}}, "host-rate needs host-cache, whose rate"),
        ({"host": "64Gi"}, "host-cache 64Gi: bytes need model or kv-bytes-per-token"),
        ({"prefill_rate": 1.0}, "prefill-rate needs host-cache, disk-cache or shared-cache"),
        ({"disk": ",".join(map(str, range(1, 40)))}, "at most 16 combinations"),
    ],
)
def test_wrong_options_are_refused_by_name(options, said) -> None:
    with pytest.raises(ValueError, match=said):
        plan_tiers(TierOptions(**options))


def test_the_advice_names_the_cheapest_that_gains_nearly_as_much() -> None:
    plan = plan_tiers(TierOptions(host="5000", disk="1000,50000", token_bytes=1000))
    assert plan is not None
    rates = {(): 0.1, ("disk", 1000): 0.2, ("disk", 50000): 0.36}
    measured = []
    for tiers in plan.combinations():
        key = next(((t.name, t.tokens) for t in tiers if t.name == "disk"), ())
        rate = rates[key] + (0.005 if len(tiers) == 2 else 0.05 if tiers and not key else 0)
        kept = {tier.name: tier.tokens or 0 for tier in tiers}
        measured.append(Measured(tiers, rate, kept, None))
    encoded = encode_tier_sizes(plan, measured, 300)
    assert "Buy a disk of 50k tokens (47.7 MiB): the hit rate becomes 36.0%" in encoded["advice"]
    assert "reach 36.5%" in encoded["advice"]
    nothing = [Measured(each.tiers, 0.1, each.kept, None) for each in measured]
    said = encode_tier_sizes(plan, nothing, 300)["advice"]
    assert said.startswith("No tier is worth it: the pool of 300 tokens alone hits 10.0%")


def test_the_command_prints_measures_and_writes_them(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [list(range(100 * n, 100 * n + 80)) for n in range(6)] * 2
    trace.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    options = ["--pool", "160", "--disk-cache", "--kv-bytes-per-token", "1000"]
    options += ["--prefill-rate", "1000", "--json", str(tmp_path / "out.json")]
    options += ["--html", str(tmp_path / "out.html")]
    assert main(["replay", str(trace), *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Buy a disk of" in shown and "no tier" in shown and "from disk" in shown
    report = json.loads((tmp_path / "out.json").read_text())
    rows = report["tier_sizes"]["rows"]
    assert [each["chosen"] for each in rows] == [False, True]
    assert rows[0]["hit_rate"] == 0.0 and rows[1]["hit_rate"] == pytest.approx(6 * 79 / 960)
    counts = report["counts"]["since_start"]
    assert counts["loaded_tokens"]["disk"] == counts["hit_tokens"] == 6 * 79
    assert rows[1]["saved_seconds"] == pytest.approx(report["tiers"]["saved_seconds"]) != 0
    page = (tmp_path / "out.html").read_text()
    assert 'id="tier-sizes"' in page and "Buy a disk of" in page


def test_a_shared_tier_is_the_last_one_asked(tmp_path: Path, capsys) -> None:
    """Main memory keeps two prompts of twelve; what it has not, the server has."""
    trace = tmp_path / "trace.jsonl"
    prompts = [list(range(100 * n, 100 * n + 80)) for n in range(12)]
    prompts += [*prompts, *prompts[-2:]]
    trace.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    options = ["--pool", "96", "--host-cache", "320", "--shared-cache", "--no-compare"]
    assert main(["replay", str(trace), *options, "--json", str(tmp_path / "out.json")]) == 0
    assert "from shared" in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "out.json").read_text())
    loaded = report["counts"]["since_start"]["loaded_tokens"]
    assert loaded["shared"] == 12 * 79 and loaded["host"] > 0
    rows = report["tier_sizes"]["rows"]
    assert [[tier["name"] for tier in each["tiers"]] for each in rows] == [
        [], ["shared"], ["host"], ["host", "shared"],
    ]  # fmt: skip


def test_the_curve_is_that_of_the_pool_without_its_tiers(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [[*range(50), *range(100 * n, 100 * n + 80)] for n in range(12)] * 2
    trace.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    reports = []
    for options in ([], ["--disk-cache"]):
        made = tmp_path / "made.json"
        assert main(["replay", str(trace), "--pool", "320", "--json", str(made), *options]) == 0
        reports.append(json.loads(made.read_text()))
    capsys.readouterr()
    alone, tiered = reports
    assert tiered["counts"]["since_start"]["loaded_tokens"]["disk"] > 0
    assert tiered["curve"]["points"] == alone["curve"]["points"]
    assert "that the pool alone achieved" in tiered["curve"]["note"]
    assert tiered["present"]["hit_rate"] > alone["present"]["hit_rate"]
