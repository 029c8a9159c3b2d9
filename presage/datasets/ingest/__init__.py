"""Ingestion: traces of any size into a store, in two passes of bounded memory.

The first pass reads the sources into sorted runs on disk. The second processes one range of workflows at a time: it
drops workflows that are repeated or already stored, validates the others and writes their parts. One commit adds all
parts. A killed ingestion resumes when the same command is run again; a failed one leaves the store unchanged. A single
workflow must fit in memory.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.datasets.adapters.recording import is_recording
from presage.datasets.adapters.spans.conventions import doubtful
from presage.datasets.ingest.applications import MERGED, application_types, as_stored, retyped
from presage.datasets.ingest.sources import FOLDED, Feed, Gathered, Progress, feeds_of, gather, request_logs
from presage.datasets.ingest.spill import Journal, Planned, RangeWritten, ranges, read_range
from presage.datasets.schema import conform, workflow_codes, workflow_count
from presage.datasets.schema.names import NO_NAMES, NameMapping
from presage.datasets.schema.source import Origin, Source
from presage.datasets.schema.validate import drop_invalid, refuse_all_skipped, refuse_notices, validate, without
from presage.datasets.store import against, differing, names_of
from presage.datasets.store.parts import MANIFEST, Manifest, commit, is_store, write_parts, writing
from presage.errors import OutputError, PresageError, TraceError

__all__ = ["Feed", "IngestReport", "Progress", "append", "ingest", "request_logs"]

RANGE_BYTES: Final = 64 * 2**20
_NO_TIME: Final = np.iinfo(np.int64).max


@dataclass(frozen=True)
class IngestReport:
    """The number of workflows and steps that an ingestion added, and what it left out."""

    workflows: int
    steps: int  # of these, and of the workflows that were extended
    already_present: int  # workflows that the store already had, with the same content
    repeated: int  # workflows that several sources had, with the same content
    skipped: Mapping[str, int]  # number of rows or workflows by reason
    resumed: int  # sources that an interrupted ingestion had already read
    extended: int = 0  # workflows that the store had, which went on or had been cut
    notices: Mapping[str, int] = field(default_factory=dict)  # what in spans was not read, or was mended, how often


def append(table: pa.Table, store: str | Path) -> IngestReport:
    """Add the workflows of a table to a store, creating it if needed; as `ingest`."""
    origin = Origin.of("trace to append", table.num_rows)
    chunk = Source(conform(table, origin), origin)
    return ingest([Feed("trace to append", lambda: iter([chunk]))], store)


def ingest(
    sources: Sequence[str | Path | Feed],
    store: str | Path,
    *,
    since: dt.datetime | None = None,
    until: dt.datetime | None = None,
    skip_bad: bool = False,
    strict: bool = False,
    source_format: str = "auto",
    parents_elsewhere: bool = False,
    on_ray: bool = False,
    names: NameMapping = NO_NAMES,
    min_identity_confidence: float | None = None,
    progress: Progress = lambda _doing, _share: None,
) -> IngestReport:
    """Validate traces and add them to a store, creating it if needed; all or nothing.

    A workflow that the store already has with the same content is skipped; one that went on since, or was cut there, is
    extended. Concurrent writers wait for each other.

    Args:
        sources: paths as for `read_traces`, and feeds.
        store: folder of the store.
        since: skip workflows that began before this time (with a zone) or have no start time.
        until: skip workflows that began at this time or later, or have no start time.
        skip_bad: skip and count workflows with a bad row, instead of raising.
        strict: raise where anything in spans was not read, was lost or dropped, or is doubtful.
        source_format: as for `read_traces`.
        parents_elsewhere: as for `open_sources`.
        on_ray: read the paths with Ray Data, in groups; all workers share a file system.
        names: folds names of agents and workflow types. A new store keeps it, with that of the stores among the
            sources, and folds all that is ingested later.
        min_identity_confidence: leave out and count workflows with a step whose `identity_confidence` is lower.
        progress: called with the current activity and the share done.

    Raises:
        TraceError: as `read_traces`, or with `strict`; the store or another source has a workflow with other content;
            the folder is not a store, or folds names otherwise.
        OutputError: the store could not be written and is unchanged.
        ConfigurationError: `on_ray`, and Ray is not installed.
    """
    if not sources:
        raise TraceError("no traces given: name at least one store, file, folder of spans or MLflow experiment")
    inputs = feeds_of(sources, source_format, skip_bad, parents_elsewhere)
    root = Path(store)
    names = names_of([source for source in sources if not isinstance(source, Feed)]).and_then(names)
    try:
        with writing(root, lambda: progress("waiting for another writer of the store", None)) as manifest:
            manifest = _naming(root, manifest, names)
            options = (since, until, skip_bad, source_format, parents_elsewhere, manifest.names.to_dict())
            least = [] if min_identity_confidence is None else [str(min_identity_confidence)]
            command = [*map(str, options), *least, *(str(Path(source.name).absolute()) for source in inputs)]
            journal = Journal(root, command)
            try:
                recordings = [feed.path for feed in inputs if feed.path is not None and is_recording(feed.path)]
                types = application_types(recordings, manifest.names)
                if types.num_rows:  # all is read here then, not by Ray's workers
                    inputs = [replace(feed, begin=partial(retyped, feed.begin, types), path=None) for feed in inputs]
                gathered = gather(
                    inputs,
                    journal,
                    manifest.sizes,
                    str(root),
                    source_format=source_format,
                    skip_bad=skip_bad,
                    parents_elsewhere=parents_elsewhere,
                    on_ray=on_ray,
                    names=manifest.names,
                    progress=progress,
                )
                if strict:
                    notices = doubtful(gathered.notices)
                    refuse_notices({what: n for what, n in notices.items() if not what.startswith((FOLDED, MERGED))})
                gathered = replace(gathered, types=types)
                source_names = [source.name for source in inputs]
                writing_pass = _SecondPass(
                    source_names, gathered, root, manifest, journal, since, until, skip_bad, min_identity_confidence
                )
                report = writing_pass.run(progress)
            except (PresageError, OSError):
                journal.discard()
                raise
            journal.discard()
    except PresageError:
        raise
    except OSError as error:
        raise OutputError(
            f"{root}: the store could not be written ({error.strerror or error}); it reads as before: make room or "
            "check permissions, then append again"
        ) from error
    return report


def _naming(root: Path, manifest: Manifest, names: NameMapping) -> Manifest:
    """The manifest with the mapping of a new store; raises TraceError if the store has another one."""
    if not is_store(root):
        return replace(manifest, names=names)
    if names and names != manifest.names:
        raise TraceError(
            f"{root}: its names were folded by {manifest.names}; found {names} for what is added, and expected the "
            "same: leave patterns out, as the store applies its own; or fold them further into a new store: presage "
            f"traces ingest {root} --to NEW with the patterns to add"
        )
    return manifest


@dataclass(frozen=True)
class _SecondPass:
    """Validates and writes one range of workflows at a time, then commits."""

    names: Sequence[str]
    gathered: Gathered
    root: Path
    manifest: Manifest
    journal: Journal
    since: dt.datetime | None
    until: dt.datetime | None
    skip_bad: bool
    min_identity_confidence: float | None

    def run(self, progress: Progress) -> IngestReport:
        more = len(self.names) - 5
        named = ", ".join(self.names[:5]) + (f" and {more} more" if more > 0 else "")
        skipped = Counter[str]()
        for source in self.gathered.sources:
            skipped.update(source.skipped)
        if not any(source.rows for source in self.gathered.sources):
            refuse_all_skipped(0, skipped, named)
        if self.gathered.spoiled:
            skipped["workflow with a skipped row"] = len(self.gathered.spoiled)
        done = self._write(progress)
        for range_ in done:
            skipped.update(range_.skipped)
        counts = ("workflows", "steps", "already_present", "repeated", "extended")
        total = {name: sum(getattr(range_, name) for range_ in done) for name in counts}
        if self.since is None and self.until is None and self.min_identity_confidence is None:
            refuse_all_skipped(total["workflows"] + total["already_present"] + total["extended"], skipped, named)
        notices = self.gathered.notices
        return IngestReport(**total, skipped=dict(skipped), resumed=self.gathered.resumed, notices=notices)

    def _write(self, progress: Progress) -> list[RangeWritten]:
        held = self.root / MANIFEST
        plan = Planned(
            hashlib.sha256(held.read_bytes() if held.exists() else b"").hexdigest(),
            [run.name for run in self.gathered.runs],
            ranges(self.gathered.runs, RANGE_BYTES),
        )
        written = self.journal.ranges_written(plan)
        low = 0
        for number, high in enumerate(plan.ends):
            progress("checking and writing", number / len(plan.ends))
            if number not in written:
                written[number] = self._write_range(number, low, high)
                self.journal.add(written[number])
                pa.default_memory_pool().release_unused()
            low = high + 1
        done = [written[number] for number in range(len(plan.ends))]
        parts = [part for range_ in done for part in range_.parts]
        if parts:
            progress("committing", None)
            replaced: dict[str, list[str]] = {}
            notices = self.gathered.notices
            for range_ in done:
                for name, ids in range_.replaced.items():
                    replaced.setdefault(name, []).extend(ids)
            commit(parts, self.journal.staging, self.root, self.manifest, self.gathered.schema, replaced, notices)
        return done

    def _write_range(self, number: int, low: int, high: int) -> RangeWritten:
        lined = [source.lined for source in self.gathered.sources]
        table, origin = read_range(self.journal.folder, self.gathered.runs, low, high, self.names, lined)
        skipped = Counter[str]()
        table, origin = without(table, origin, self.gathered.spoiled)
        if self.since is not None or self.until is not None:
            table, origin, beside = _begun_between(table, origin, self.since, self.until)
            skipped.update(beside)
        if self.min_identity_confidence is not None:
            table, origin, uncertain = _certain(table, origin, self.min_identity_confidence)
            skipped.update(uncertain)
        table, origin, repeated = drop_repeats(table, origin)
        table = as_stored(table, self.gathered.types, self.root, self.manifest)
        if self.skip_bad:
            table, dropped = drop_invalid(table, origin)
            skipped.update({f"workflow with {reason}": count for reason, count in dropped.items()})
        elif table.num_rows:
            table = validate(table, origin)
        del origin
        if not table.num_rows:
            return RangeWritten(number, [], repeated=repeated, skipped=dict(skipped))
        compared = against(table, self.root, self.manifest, self.skip_bad)
        if compared.refused:
            skipped["workflow that the store has with other content"] += compared.refused
        parts = write_parts(compared.fresh, self.journal.staging) if compared.fresh.num_rows else []
        extended = sum(map(len, compared.extended.values()))
        return RangeWritten(
            number,
            parts,
            workflow_count(compared.fresh) - extended,
            compared.fresh.num_rows,
            compared.present,
            repeated,
            dict(skipped),
            extended,
            dict(compared.extended),
        )


def _begun_between(
    table: pa.Table, origin: Origin, since: dt.datetime | None, until: dt.datetime | None
) -> tuple[pa.Table, Origin, dict[str, int]]:
    """The rows of workflows that began at `since` or later and before `until`, their origin, and the number of others
    by reason.
    """
    if not table.num_rows:
        return table, origin, {}
    codes = workflow_codes(table)
    began = np.full(int(codes.max()) + 1, _NO_TIME)
    np.minimum.at(began, codes, table["started_at"].cast(pa.int64()).fill_null(_NO_TIME).to_numpy())
    left_out = {"workflow without a start time, which --since and --until go by": began == _NO_TIME}
    timed = began != _NO_TIME
    if since is not None:
        left_out[f"workflow that began before {since.isoformat()}"] = timed & (began < round(since.timestamp() * 1e6))
    if until is not None:
        left_out[f"workflow that began at {until.isoformat()} or later"] = timed & (
            began >= round(until.timestamp() * 1e6)
        )
    keep = ~np.any(list(left_out.values()), axis=0)[codes]
    counted = {reason: count for reason, workflows in left_out.items() if (count := int(workflows.sum()))}
    return table.filter(pa.array(keep)), origin.part(keep), counted


def _certain(table: pa.Table, origin: Origin, least: float) -> tuple[pa.Table, Origin, dict[str, int]]:
    """The rows of workflows without a step that is theirs less certainly, their origin, and the number of others."""
    less = pc.fill_null(pc.less(table["identity_confidence"], pa.scalar(least, pa.float32())), False).to_numpy()
    if not less.any():
        return table, origin, {}
    codes = workflow_codes(table)
    left_out = np.unique(codes[less])
    keep = ~np.isin(codes, left_out)
    reason = f"workflow with a step of an identity less certain than {least:g}"
    return table.filter(pa.array(keep)), origin.part(keep), {reason: len(left_out)}


def drop_repeats(table: pa.Table, origin: Origin) -> tuple[pa.Table, Origin, int]:
    """The rows but workflows that an earlier source has with the same content, their origin, and the number dropped.

    Workflows with other content remain, and `validate` reports them.
    """
    if len(origin.names) < 2 or not table.num_rows:
        return table, origin, 0
    codes, steps = workflow_codes(table), table["step"].to_numpy()
    pairs, pair = np.unique(codes * len(origin.names) + origin.sources, return_inverse=True)
    code_of_pair = pairs // len(origin.names)
    begins = np.searchsorted(code_of_pair, code_of_pair)
    turn = (np.arange(len(pairs)) - begins)[pair]  # 0 for the rows of the first source that has the workflow
    keep = np.ones(table.num_rows, bool)
    repeats = 0
    for nth in range(1, int(turn.max()) + 1):
        later = np.flatnonzero(turn == nth)
        first = np.flatnonzero((turn == 0) & np.isin(codes, codes[later]))
        counts = [np.bincount(codes[rows], minlength=codes.max() + 1) for rows in (first, later)]
        equally_long = (counts[0] == counts[1])[codes]
        first, aligned = first[equally_long[first]], later[equally_long[later]]
        first, aligned = (rows[np.lexsort((steps[rows], codes[rows]))] for rows in (first, aligned))
        unlike, _ = differing(table.take(pa.array(first)), table.take(pa.array(aligned)))
        same = np.setdiff1d(codes[aligned], codes[aligned][unlike])
        keep[later[np.isin(codes[later], same)]] = False
        repeats += len(same)
    if keep.all():
        return table, origin, 0
    return table.filter(pa.array(keep)), origin.part(keep), repeats
