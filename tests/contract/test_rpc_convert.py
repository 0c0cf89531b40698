"""Records survive the wire: every field of every record, through real bytes."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.core import records
from rollbook.core.errors import InvalidRequest
from rollbook.core.idempotency import payload_digest
from rollbook.rpc import convert
from rollbook.v1 import ledger_pb2 as pb

PAIRS: dict[type, tuple[Any, Any]] = {
    records.SlotKey: (convert.slot_key_message, convert.slot_key),
    records.RunRecord: (convert.run_message, convert.run_record),
    records.RoleTerm: (convert.role_term_message, convert.role_term),
    records.Cursor: (convert.cursor_message, convert.cursor),
    records.GroupSpec: (convert.group_spec_message, convert.group_spec),
    records.PolicyVersion: (convert.policy_version_message, convert.policy_version),
    records.Lineage: (convert.lineage_message, convert.lineage),
    records.LeaseGrant: (convert.lease_grant_message, convert.lease_grant),
    records.LeaseReply: (convert.lease_reply_message, convert.lease_reply),
    records.Trajectory: (convert.trajectory_message, convert.trajectory),
    records.Submission: (convert.submission_message, convert.submission),
    records.SubmitResult: (convert.submit_result_message, convert.submit_result),
    records.FailureReport: (convert.failure_report_message, convert.failure_report),
    records.ToolCall: (convert.tool_call_message, convert.tool_call),
    records.HeartbeatReply: (convert.heartbeat_reply_message, convert.heartbeat_reply),
    records.PlanItem: (convert.plan_item_message, convert.plan_item),
    records.Plan: (convert.plan_message, convert.plan),
    records.SampleData: (convert.sample_data_message, convert.sample_data),
    records.Checkpoint: (convert.checkpoint_message, convert.checkpoint),
    records.ResumePoint: (convert.resume_point_message, convert.resume_point),
    records.Violation: (convert.violation_message, convert.violation),
}

INTEGERS = st.integers(-(2**63), 2**63 - 1)
SCALARS: dict[Any, Any] = {
    int: INTEGERS,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that the annotation allows and the wire can carry."""
    if hint in SCALARS:
        return SCALARS[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if a is type(None) else values_of(a) for a in args))
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    if issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    return st.builds(hint, **{name: values_of(h) for name, h in typing.get_type_hints(hint).items()})


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
def test_a_record_survives_the_wire(kind: type) -> None:
    to_message, to_record = PAIRS[kind]

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(values_of(kind))
    def check(record: Any) -> None:
        message = to_message(record)
        assert to_record(type(message).FromString(message.SerializeToString())) == record

    check()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(values_of(records.Submission))
def test_the_payload_digest_is_the_same_on_both_sides(submission: Any) -> None:
    message = pb.Submission.FromString(convert.submission_message(submission).SerializeToString())
    assert payload_digest(convert.submission(message)) == payload_digest(submission)


def test_a_message_has_the_fields_of_its_record() -> None:
    for kind in (*PAIRS, records.RunRules):
        names = kind._fields if kind is records.SlotKey else [f.name for f in dataclasses.fields(kind)]
        assert [f.name for f in getattr(pb, kind.__name__).DESCRIPTOR.fields] == list(names), kind.__name__


def test_every_record_that_travels_is_tested_here() -> None:
    not_by_themselves = {"RunRules"}
    travelling = {c.__name__ for c in vars(records).values() if dataclasses.is_dataclass(c)} | {"SlotKey"}
    assert travelling - not_by_themselves == {kind.__name__ for kind in PAIRS}
    assert {m.name for m in pb.DESCRIPTOR.message_types_by_name.values()} == travelling | {"HeldLease"}


def test_every_enum_has_a_wire_value_per_member_and_an_unspecified_zero() -> None:
    assert {wire.DESCRIPTOR.name for wire, _ in convert.ENUMS.values()} == set(pb.DESCRIPTOR.enum_types_by_name)
    for kind, (wire, prefix) in convert.ENUMS.items():
        assert wire.Name(0) == f"{prefix}_UNSPECIFIED"
        assert set(wire.keys()) - {f"{prefix}_UNSPECIFIED"} == {f"{prefix}_{member.name}" for member in kind}


def test_an_unspecified_or_unknown_enum_is_refused() -> None:
    for number in (0, 99):
        with pytest.raises(InvalidRequest, match="Role number"):
            convert.role_term(pb.RoleTerm(role=number, epoch=1))  # type: ignore[arg-type]


def test_an_unspecified_plan_outcome_means_that_the_step_has_not_ended() -> None:
    assert convert.plan(pb.Plan(step=1)).outcome is None


def test_a_missing_slot_key_is_refused_instead_of_meaning_slot_zero() -> None:
    with pytest.raises(InvalidRequest, match="Submission.key is missing"):
        convert.submission(pb.Submission(lease_token=1))


def test_a_reward_of_zero_is_not_the_absence_of_a_reward() -> None:
    for reward in (0.0, None):
        item = records.PlanItem(0, records.SlotKey(0, 0), "", reward)
        message = pb.PlanItem.FromString(convert.plan_item_message(item).SerializeToString())
        assert convert.plan_item(message).reward == reward
        assert message.HasField("reward") is (reward is not None)


def test_reports_and_samples_of_older_workers_are_read_with_defaults() -> None:
    key = pb.SlotKey(ordinal=1, sibling=0)
    old = pb.FailureReport(key=key, lease_token=1, incarnation="w", status=4, blame=2, reason="gone")
    report = convert.failure_report(pb.FailureReport.FromString(old.SerializeToString()))
    assert (report.sandbox_status, report.n_tokens, report.evidence_json, report.final) == (
        records.SandboxStatus.NOT_USED, 0, "{}", False,
    )  # fmt: skip
    sample = convert.submission(
        pb.Submission(key=key, trajectory=pb.Trajectory(), reward=1.0, reward_status=1, sandbox_status=1, finish_reason=1)
    )
    assert sample.blame is None


def test_free_text_that_utf8_cannot_carry_is_replaced() -> None:
    result = records.SubmitResult(records.SlotKey(0, 0), records.SubmitOutcome.INVALID, "file \udcff")
    assert convert.submit_result(convert.submit_result_message(result)).reason == "file ?"
