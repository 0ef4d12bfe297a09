"""All trials, in the order of the table. Where `quick` is 0 other tests of the suite try the same."""

from __future__ import annotations

from lockstep.workbench.references.llamacpp import library
from tests.soak import attaching, folders, mixups, models, processes, recordings, screens
from tests.soak.trial import Trial

WHOLE = "every reported step is recorded, with the tokens of an undisturbed run"
HARMLESS = "a result or one of our errors, and nothing that a terminal obeys"


def prepare() -> None:
    """What all tries need."""
    processes.expected()
    for log in (False, True):
        recordings.whole(log)


#: Where llama.cpp is installed.
_LLAMACPP = (
    Trial(
        "recorder-llama", "the same with llama.cpp's recorder, where the extra is installed",
        "it is reported; nothing half-made is in the cache", processes.kill_llamacpp, 30,
    ),
)  # fmt: skip

TRIALS = (
    Trial(
        "rank", "SIGKILL to one of two ranks, at work or at rest",
        f"the rank is named at once; {WHOLE}; `restart` goes on", processes.kill_rank, 30,
    ),
    Trial(
        "host", "SIGKILL to the host while it drives two ranks",
        f"the ranks end; {WHOLE}; the next writer folds it", processes.kill_host, 30,
    ),
    Trial(
        "screens", "SIGKILL to the screens in a real terminal, while the model runs",
        f"host and ranks end, the session is folded; {WHOLE}", processes.kill_screens, 30,
    ),
    Trial(
        "recorder", "SIGKILL to the recorder of a golden reference, or to whoever asked for it",
        "it is reported; nothing half-made is in the cache", processes.kill_recorder, 30,
    ),
    *(_LLAMACPP if library.is_installed() else ()),
    Trial(
        "golden", "SIGKILL to the recorder, the host or the screens in a real terminal, while the screens wait for a "
        "golden reference (before its passes or among them) or, 1 of 4, for an export",
        "the screens report it and go on, or end and leave nothing; nothing half-made is in the cache or beside the "
        f"export; {WHOLE}", screens.kill_at_golden, 30, seconds=300,
    ),
    Trial(
        "screens-long", "15 minutes of screens in a real terminal: up to 4,000 steps, branches, exports, restarts and "
        "golden recordings beside twenty busy processes", "the screens answer, stay below a GiB, and leave a session "
        "that `verify` passes and nothing else", screens.long_session, 1, seconds=1800,
    ),
    Trial(
        "stopped", "SIGSTOP to one of two ranks, from their start to rest, (1 of 2) on a busy machine",
        "that rank is named, and what it stands at", processes.stop_rank, 30,
    ),
    Trial(
        "writer", "SIGKILL to a writer in mid-commit, twice on one file",
        "all reported steps are there, bit for bit, and at most one more", recordings.kill_writer, 30,
    ),
    Trial(
        "power", "power cut: of what was not yet synced, some sectors are lost",
        "all synced steps are there; the others are a beginning of what was written, bit for bit; where more was "
        "written, the file is called incomplete", recordings.cut_power, 50, quick=2,
    ),
    Trial(
        "truncated", "a session's file cut short, or (1 of 4) its log",
        "reported; a shorter log shows an earlier moment, bit for bit", recordings.truncate, 200,
    ),
    Trial(
        "flipped", "one bit turned over in a session's file, or (3 of 10) in its log",
        "what is shown is equal, or refused with its place; `verify` reports it", recordings.flip_bit, 500,
    ),
    Trial(
        "two-writers", "a second process records to the file of a first; (1 of 2) the first is killed then",
        "the second is refused; all steps of the first are there, bit for bit; a third records on",
        recordings.two_writers, 10,
    ),
    Trial(
        "foreign-log",
        "a log that is not its own beside a session: a killed run's, that of a run which went on from it, an older "
        "copy's; some cut short; (1 of 4) both were killed",
        "all steps are there, bit for bit, and the log as well; where the session's own is missing it is incomplete, "
        "and not recorded on", mixups.foreign_log, 100, quick=8,
    ),
    Trial(
        "links-writers", "while one records, others want its file by a second name, a link, a folder's link; (1 of 3) "
        "the first is killed then", "all others are refused; all steps are there, bit for bit", mixups.links_writers,
        20, quick=2,
    ),
    Trial(
        "clock", "the clock jumps by up to two days before each step, and with it the dates of the files",
        "every step is read as soon as it is written; it is recorded on, packed and verified", mixups.clock, 20,
        quick=2,
    ),
    Trial(
        "full-disk", "a disk that is full, at ten points",
        "it is reported; all committed steps are there; recording goes on once there is room", recordings.fill_disk, 10,
    ),
    Trial(
        "full-dump", "a disk that is full while `attach` records an engine and makes its session, at ten points",
        "the engine ends as ever; what was recorded is a whole session, or there is none and one line states why; "
        "nothing half-made is left", folders.fill_dump, 10, quick=1,
    ),
    Trial(
        "read-only", "commands of a user who may write to no folder, file or home that they name, one of each kind",
        "it works, or is one line with its exit code; nothing is changed", folders.write_nowhere,
        len(folders.read_only.CASES),
    ),
    Trial(
        "links", "a process that exchanges temporary folders for links while they are made, emptied and swept (1 of 2: "
        "while exports are written)", "nothing that the links lead to is gone", folders.put_links, 30, quick=3,
    ),
    Trial(
        "attached", "SIGKILL to a rank of an attached engine, to its main process, or to `attach`, at any moment",
        "the rank is named, or that the command failed; the passes until then are a session; nothing of it runs on",
        attaching.kill_attached, 30, quick=3,
    ),
    Trial(
        "hostile-attached", "an attached engine that leaves pipes, links, gigabytes, daemons, one of each kind",
        "the recording is kept or refused with its place; nothing hangs or runs on", attaching.attach_hostile,
        len(attaching.HOSTILE), quick=2,
    ),
    Trial(
        "flood", "an attached engine that taps without end: names, passes, tensors, threads",
        "it is reported and the engine goes on; disk within its limit; what was recorded before is kept",
        attaching.attach_flood, len(attaching.FLOODS), quick=1,
    ),
    Trial(
        "hostile", "a session made to cost memory or time, one of each kind",
        "read and verified within 512 MiB and what the interpreter needs", recordings.read_hostile,
        len(recordings.KINDS), seconds=300,
    ),
    Trial(
        "odd", "a session with senseless values, one of each kind: read, verified, exported, replayed",
        HARMLESS, recordings.read_odd, len(recordings.ODDITIES),
    ),
    Trial(
        "tokenisers", "a tokenizer made to cost memory or time, or to bring its library down, one of each kind",
        "it encodes and decodes, or is one error that names it, within 2 GiB and 10 s of the processor",
        models.use_tokenizer, len(models.KINDS), seconds=300,
    ),
    Trial("fuzz-values", "the same with any values (5 files a try)", HARMLESS, recordings.fuzz_values, 20),
    Trial("fuzz-bytes", "the same with any bytes (10 files a try)", HARMLESS, recordings.fuzz_bytes, 20),
    Trial(
        "fuzz-screens", "any values in every pane (2 files a try)", HARMLESS, recordings.fuzz_panes, 5, seconds=300,
    ),
    Trial(
        "live", "4,000 steps of two ranks, read while they are recorded",
        f"a step is there once it is reported; {WHOLE}", processes.live_steps, 1, seconds=400,
    ),
    Trial(
        "machines", "two groups of torchrun in network namespaces join a host: undisturbed, cut off in mid-step (3 "
        "of 5), with another secret", "the tokens of local ranks; the lost rank is named and all processes end; "
        "refused by both sides", processes.join_machines, 5, seconds=300,
    ),
)  # fmt: skip
