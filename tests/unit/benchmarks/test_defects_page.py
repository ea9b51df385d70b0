"""The page of defects is what its tables say; ``python -m benchmarks.defects_page`` writes it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.defects_page import page_of, tables

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "benchmarks/tables/defects.md"


def test_the_page_is_what_the_tables_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_of(text) == text, "run python -m benchmarks.defects_page"
    for table in tables():
        for defect in table.defect:
            assert f"### {defect.title}\n" in text
            assert not defect.schedules or defect.schedules[0].partition(" ")[2] in " ".join(text.split())


def test_the_readme_counts_what_the_tables_have() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = [[defect.found for defect in table.defect] for table in tables()]
    vllm, sglang, transformers = (one.count("search") for one in found)
    for counted in (f"{vllm} in vLLM", f"{sglang} in SGLang", f"{transformers} in the continuous batching"):
        assert counted in text
    assert f"{sum(one.count('reading') for one in found)} more were found by reading" in text
    every = [defect for table in tables() for defect in table.defect]
    assert f"{sum(bool(one.fix) for one in every)} of the {len(every)} have a fix" in text


def test_what_is_written_by_hand_stays() -> None:
    text = "# Defects\n\n## vLLM\n\nold\n\n## By hand\n\nkept\n"
    written = page_of(text)
    assert written.startswith("# Defects\n\n## vLLM\n\n")
    assert "old" not in written.split("\n")
    assert "## By hand\n\nkept\n" in written
