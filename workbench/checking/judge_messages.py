"""What a check asks the process that judges its run, and what that answers."""

from __future__ import annotations

import msgspec
from msgspec.msgpack import Decoder

from lockstep.workbench.diagnosis.judgement import Judgement
from lockstep.workbench.judgements.golden_event import UntappedRun


class SidesToJudge(msgspec.Struct, frozen=True, tag="sides"):
    """The sessions of the run and of the reference, and the checkpoint that ran, in an engine of `dtype`. First."""

    engine: str
    golden: str
    floor: str | None
    checkpoint: str
    dtype: str


class JudgeTaps(msgspec.Struct, frozen=True, tag="taps"):
    """Every tap of the run."""


class JudgeUntapped(msgspec.Struct, frozen=True, tag="untapped"):
    """The session of the same run without taps."""

    recording: str


class JudgeLedger(msgspec.Struct, frozen=True, tag="ledger"):
    """The session of the same run under corrections."""

    recording: str


class JudgedTaps(msgspec.Struct, frozen=True, tag="taps"):
    """The verdict on every tap."""

    judgement: Judgement


class JudgedUntapped(msgspec.Struct, frozen=True, tag="untapped"):
    """The verdict on the run without taps."""

    run: UntappedRun


class NotJudged(msgspec.Struct, frozen=True, tag="none"):
    """There is none: whoever asks will see why."""


JudgeRequest = JudgeTaps | JudgeUntapped | JudgeLedger
JudgeAnswer = JudgedTaps | JudgedUntapped | NotJudged
SIDES: Decoder[SidesToJudge] = Decoder(SidesToJudge)
REQUESTS: Decoder[JudgeRequest] = Decoder(JudgeRequest)
ANSWERS: Decoder[JudgeAnswer] = Decoder(JudgeAnswer)
