"""`scripts/figures.py`: documents hold what docs/figures.json gives, and comparisons name the rival's best setting."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import figure_sections  # noqa: E402
import figure_tables  # noqa: E402
import figures  # noqa: E402
import machine  # noqa: E402


@pytest.fixture
def results() -> dict:
    return copy.deepcopy(figures.read_results(ROOT))


@pytest.mark.parametrize("document", figures.DOCUMENTS)
def test_documents_hold_what_the_results_give(document: str, results: dict) -> None:
    text = (ROOT / document).read_text()
    assert text == figures.filled(text, results, document), "run `python3 scripts/figures.py --documents`"


def test_every_table_stands_in_a_document() -> None:
    texts = [(ROOT / document).read_text() for document in figures.DOCUMENTS]
    places = {place["name"] for text in texts for place in figures.PLACE.finditer(text)}
    assert places == set(figure_tables.TABLES)


def test_a_figure_that_was_edited_by_hand_is_found(results: dict) -> None:
    text = (ROOT / "README.md").read_text()
    place = figures.PLACE.search(text)
    edited = text.replace(place["text"], place["text"].replace("; ", ", ", 1))
    assert edited != text
    assert figures.filled(edited, results, "README.md") == text


def test_a_place_that_nothing_fills_is_refused(results: dict) -> None:
    with pytest.raises(SystemExit):
        figures.filled("<!-- figures: nonsense -->\n<!-- end -->", results, "README.md")


def test_every_result_is_of_a_section(results: dict) -> None:
    every = {f"{section}/{one.name}" for section, of in figure_sections.SECTIONS.items() for one in of}
    assert set(results) <= every


def test_the_rivals_fastest_row_counts_not_its_first() -> None:
    row = lambda name, step_s, ratio: {"row": name, "step_s": step_s, "ratio": ratio}
    result = {"rows": [row("FusionLLM", 2.0, [1, 1, 1]), row("PyTorch, default", 2.5, [0.8, 0.7, 0.9]),
                       row("PyTorch, fused", 1.6, [1.25, 1.2, 1.3])]}
    assert figure_tables.best_rival(result)["row"] == "PyTorch, fused"


def test_readme_takes_the_rivals_fastest_row_and_names_losses_beside_codecs(results: dict) -> None:
    torch = results["pytorch/gpt2"]["result"]
    torch["rows"][-1] |= {"step_s": 0.001, "ratio": [4321.0, 1.0, 9.0]}
    rows = {row["row"]: row for row in results["pipelining/rows"]["result"]["rows"]}
    rows["fusionllm/limited"]["loss_last"], rows["fusionllm/limited/auto"]["loss_last"] = 4.0, 5.0
    rows["pytorch/sorted"]["step_s"] = [0.777]
    text = figure_tables.readme(figure_tables.Results(results))
    assert "4321.00" in text
    assert "4.00; 5.00 (+25 %)" in text
    assert "0.78; " in text


def test_readme_gives_the_errors_of_all_predictions(results: dict) -> None:
    results["memory/runs"]["result"]["rows"].append(
        results["memory/runs"]["result"]["rows"][0] | {"predicted_s": 0.1, "measured_s": 1.0})
    assert "-90 to " in figure_tables.readme(figure_tables.Results(results))


def test_a_quick_trial_says_that_it_measures_nothing(results: dict) -> None:
    results["pytorch/gpt2"]["quick"] = True
    assert "quick trial" in figure_tables.pytorch(figure_tables.Results(results))
    assert "quick trial" in figure_tables.readme(figure_tables.Results(results))


def test_predictions_are_summarised_over_all_runs() -> None:
    line = '{"testbed": "%s", "step_s": {"predicted": %s, "measured": 1.0}, ' \
        '"compute_s": {"predicted": 1, "measured": 1}, "memory_bytes": {"predicted": 1, "measured": 1}}'
    found = figure_sections.predictions("\n".join([line % ("a", 0.8), line % ("a", 1.04), line % ("b", 1.05)]))
    assert found["all"]["runs"] == 3
    assert found["all"]["within_10_percent"] == 2
    assert found["all"]["step"] == pytest.approx([4.0, -20.0, 5.0])
    assert [row["testbed"] for row in found["rows"]] == ["a", "b"]


def test_time_of_other_processes_is_what_the_machine_was_busy_less_our_own() -> None:
    tick = os.sysconf("SC_CLK_TCK")
    stat = f"cpu {3 * tick} {tick} {2 * tick} 99 99 50 50 {4 * tick} 0 0\ncpu0 1\ncpu1 1\nintr 5\n"
    assert machine.busy_seconds(stat) == (10.0, 2)
    watch = machine.Watch.__new__(machine.Watch)  # without a start, so that this process adopts no orphans
    watch.busy, watch.own, watch.cores = 100.0, 10.0, 2
    # The machine worked for 12 s, of which 8 s were ours: 4 s of 2 x 10 s.
    assert watch._share(112.0, 18.0, 10.0) == pytest.approx(0.2)
    assert watch._share(105.0, 18.0, 10.0) == 0.0


def test_a_table_without_results_says_what_to_run() -> None:
    for document in figures.DOCUMENTS:
        figures.filled((ROOT / document).read_text(), {}, document)
    made = figures.filled("<!-- figures: jax -->\n<!-- end -->", {}, "README.md")
    assert "`scripts/figures.py workers/jax-gpt2` was not run yet." in made
