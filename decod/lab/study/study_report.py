"""The study's results as text and as JSON."""

from collections.abc import Iterable
from typing import Any

from decod.lab.study.findings import FINDINGS, Judgement, ThesisFinding
from decod.lab.study.results import PointResult, Results
from decod.lab.study.study_questions import QUESTIONS

_WORDS = {True: "holds", False: "does not hold", None: "not judged"}


def to_json(results: Iterable[PointResult]) -> dict[str, Any]:
    """Return everything as one object."""
    results = Results(results)
    return {
        "thesis": "A. D. Castro Tenemaya, Analyzing Performance Bottlenecks in Collaborative Deep "
        "Learning, TU München, 2022",
        "results": [result.to_json() for result in results],
        "findings": [
            {
                "name": finding.name,
                "text": finding.text,
                "section": finding.section,
                "holds": verdict.holds,
                "figures": verdict.figures,
                "why": finding.why,
            }
            for finding, verdict in _judged(results)
        ],
        "questions": [
            {
                "name": each.name,
                "text": each.text,
                "section": each.section,
                "answer": each.answer(results),
            }
            for each in QUESTIONS
        ],
    }


def to_text(results: Iterable[PointResult]) -> str:
    """Return a table of results, findings beside it, and answers."""
    results = Results(results)
    lines = [_table(results), "", "The thesis' findings, and these results:"]
    for finding, verdict in _judged(results):
        lines += [
            "",
            f"{_WORDS[verdict.holds]}: {finding.text} (section {finding.section})",
            f"    {verdict.figures}",
        ]
        if verdict.holds is not None:
            lines.append(f"    {finding.why}")
    lines += ["", "Questions that it leaves open:"]
    for question in QUESTIONS:
        lines += [
            "",
            f"{question.text} (section {question.section})",
            f"    {question.answer(results)}",
        ]
    return "\n".join(lines)


def _judged(results: Results) -> list[tuple[ThesisFinding, Judgement]]:
    return [(finding, finding.judge(results)) for finding in FINDINGS]


def _table(results: Results) -> str:
    width = max((len(result.point.name) for result in results), default=0)
    head = f"{'':{width}}  {'runtime':>8} {'accuracy':>8} {'step()':>8} {'waiting':>8}"
    lines = [f"{head} {'sent':>9} {'rounds':>6} {'an average':>10}"]
    for each in results:
        line = f"{each.point.name:{width}}  {each.runtime_s:6.1f} s {100 * each.accuracy:6.0f} % "
        line += f"{each.optimizer_s:6.2f} s {each.wait_s:6.2f} s"
        if each.point.peers:
            line += f" {each.sent_bytes_per_s / 1e6:4.1f} MB/s {each.rounds:6d}"
            line += f" {1000 * each.averaging_s:7.0f} ms"
        lines.append(line)
    return "\n".join(lines)
