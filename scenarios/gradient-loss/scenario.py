"""Gradients that are not reduced, without a word: eight ways to lose them, and the one that the document tells of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtprobe import Arm, Mitigation, Scenario, Verdict, VerdictKind
from dtprobe.authoring import symptoms, tries

if TYPE_CHECKING:
    from dtprobe import Evidence

OFF = 1e-3
"""Of the mean gradient's norm: more than this is lost (the models are in double precision)."""

scenario = Scenario(
    name="gradient-loss",
    failure_mode="gradient-not-reduced",
    title="Gradients that DDP never reduces, in eight ways",
    claim="Eight ordinary mistakes leave gradients unreduced or falsified under DDP without an error: calling the wrapped module, no_sync "
    "left on, autograd.grad, a parameter replaced, added or unfrozen after the wrap, a hook that returns its bucket or forgets to divide.",
    source="failure document, section 4.1 (the loss it tells of is the variant sharded); measured here",
    layer="code",
    certifies_not="Nothing about FSDP. One step each: what training becomes of it is not shown.",
    world_size=2,
    timeout_s=60,
    repeats=2,
    control=Arm("worker.py", args=("--audit",)),
    fault=Arm("worker.py", args=("--wrong",)),
    mitigated=Arm("worker.py", args=("--wrong", "--audit")),
    expect={"torch>=2.9": "reproduced"},
)

sharded = scenario.with_variant(
    "sharded",
    title="A sharded parameter under DDP",
    claim="A sharded tensor that is made before DDP registers its hooks silently loses its gradient.",
    source="failure document, section 4.1",
    certifies_not="Nothing about other wrappers, nor about a sharded tensor that is hidden from DDP.",
    control=Arm("worker.py", args=("--sharded", "plain")),
    fault=Arm("worker.py", args=("--sharded", "ddp")),
    mitigated=Arm("worker.py", args=("--sharded", "fully_shard")),
    expect={"torch>=2.9": "refuted"},
    looks_like=("dtensor-mesh-mismatch",),  # what happens instead: DDP refuses to mix DTensors with plain tensors
)


@scenario.judge
def judge(evidence: Evidence) -> Verdict:
    """Steps without an error whose gradients are not the mean over the ranks; what reached the reducer, and what gradcheck said."""
    rows = symptoms.attempts(evidence, "step")
    silent = rows["error"].eq("")
    off, apart = tries.number(rows, "off"), tries.number(rows, "apart")
    passes = tries.number(rows, "gradcheck").eq(1)
    fault = rows["arm"].eq("fault")
    buckets = evidence.events("bucket").reindex(columns=["arm", "repeat", "rank", "way", "parameters"])
    reached = set(buckets.loc[buckets["arm"].eq("fault"), "way"])
    ways = set(rows.loc[fault, "way"]) if "way" in rows else set()
    never = sorted(ways - reached)
    equal = sorted(set(rows.loc[fault & off.gt(OFF) & apart.eq(0), "way"])) if ways else []
    per_step = buckets.groupby(["arm", "repeat", "rank", "way"]).size()
    counted = rows.assign(
        buckets=[
            int(per_step.get((row["arm"], row["repeat"], row["rank"], row.get("way")), 0)) for row in rows.to_dict("records")
        ]
    )
    return tries.judged(
        evidence,
        rows,
        silent & off.gt(OFF),
        shown="ended without an error and with gradients that are not the mean over the ranks",
        cured=tries.text(rows, "error").eq("GradientLoss") & off.gt(OFF),
        healed="raised GradientLoss in that very step",
        metrics={
            "gradcheck_passes": symptoms.share(rows, passes),
            "buckets_reduced": symptoms.measure(counted, "buckets", unit=""),
            "off_the_mean": symptoms.measure(rows, "off", unit=""),
            "ranks_apart": symptoms.measure(rows, "apart", unit=""),
        },
        more=f"gradcheck passed in {symptoms.counts(rows, passes, 'fault')[0]} of them. No bucket reached the reducer in "
        f"{', '.join(never) or 'none'}; the ranks were wrong alike in {', '.join(equal) or 'none'}."
        if ways and off[fault].gt(OFF).any()
        else "",
    )


@sharded.judge
def judge_sharded(evidence: Evidence) -> Verdict:
    """Whether DDP took a sharded parameter at all."""
    rows = symptoms.attempts(evidence, "wrap")
    if (nothing := symptoms.undecided(evidence, {"wraps": rows})) is not None:
        return nothing
    refused = tries.text(rows, "error").ne("")
    own = rows["arm"].eq("fault") & tries.text(rows, "how").eq("ddp")
    said, tried = int((refused & own).sum()), int(own.sum())
    kind = VerdictKind.NOT_REPRODUCED
    if tried:
        kind = VerdictKind.REFUTED if said == tried else VerdictKind.PARTLY
    kinds = rows[refused & own].drop_duplicates("of")[["of", "text"]].itertuples(index=False) if said else ()
    texts = "; ".join(f'{kind}: "{text.split(chr(10))[0][:80]}"' for kind, text in kinds)
    steps = symptoms.attempts(evidence, "sharded step")
    mitigation, cured = Mitigation.NONE, ""
    if evidence.ran("mitigated"):
        well, total = symptoms.counts(steps, steps["error"].eq("") & tries.number(steps, "checked").gt(0), "mitigated")
        held = well == total > 0 and symptoms.ended_well(evidence, "mitigated")
        mitigation = Mitigation.HELD if held else Mitigation.FAILED
        cured = f" Under fully_shard {well} of {total} audited steps lost nothing."
    return Verdict(
        kind=kind,
        mitigation=mitigation,
        control_healthy=symptoms.ended_well(evidence, "control") and symptoms.unmarred(symptoms.attempts(evidence), "control"),
        metrics={
            "refused_at_the_wrap": symptoms.share(rows, refused, documented="never: lost in silence"),
            "time_to_error_s": symptoms.measure(rows[refused], "took_s"),
            "wrap_s": symptoms.measure(rows, "took_s"),
        },
        because=f"DDP refused sharded parameters when they were wrapped in {said} of {tried} tries{f' ({texts})' if texts else ''}."
        f"{cured}",
    )
