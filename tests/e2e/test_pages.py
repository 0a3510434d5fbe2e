"""What a person sees of the operation in a browser: Prefect's and MLflow's pages, and the report.

Each page is pictured into pytest's directory. The pictures in docs/img are made so, of the default scale:

    SCREENSHOTS=docs/img SCREENSHOTS_SCALE=tiny .venv/bin/python -m pytest tests/e2e/test_pages.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from rlhf.evaluation.wording import percent
from tests.e2e import browser
from tests.e2e.operation import MODEL, Operation
from tests.e2e.test_pipeline import STAGES

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser.page() as found:
        yield found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = os.environ.get("SCREENSHOTS")
    return Path(chosen).resolve() if chosen else tmp_path_factory.mktemp("pictures")


def shows(page: Page, *texts: str) -> None:
    for text in texts:
        expect(page.get_by_text(text).first).to_be_visible()


def picture(page: Page, path: Path) -> None:
    """For people; no test looks at it."""
    page.evaluate("document.fonts.ready")
    page.wait_for_timeout(1000)  # charts grow, graphs settle
    page.screenshot(path=path)


def test_prefect_shows_the_run_with_its_lines(operation: Operation, page: Page, pictures: Path) -> None:
    page.goto(f"{operation.servers.prefect}/runs/flow-run/{operation.night}")
    name = operation.client.read_flow_run(operation.night).name
    shows(page, name, "auto-scheduled", "Completed", "nightly", "9 Task runs", "all expectations met")
    expect(page.locator("canvas").first).to_be_visible()  # the graph
    picture(page, pictures / "prefect-run.png")
    page.get_by_role("tab", name="Task Runs").or_(page.get_by_text("Task Runs", exact=True)).first.click()
    shows(page, *STAGES)


def test_prefect_shows_the_artifacts(operation: Operation, page: Page, pictures: Path) -> None:
    artifacts = operation.artifacts(operation.night)
    page.goto(f"{operation.servers.prefect}/artifacts/artifact/{artifacts['progress-train-ppo'].id}")
    shows(page, "progress-train-ppo", "100%", "train_ppo ")
    page.goto(f"{operation.servers.prefect}/artifacts/artifact/{artifacts['pipeline-summary'].id}")
    shows(page, "Pipeline run", "gain in points", MODEL)
    picture(page, pictures / "prefect-summary.png")


def open_form(operation: Operation, page: Page) -> None:
    page.goto(f"{operation.servers.prefect}/deployments/deployment/{operation.deployment('pipeline/on-demand').id}/run")


def field(page: Page, label: str) -> Locator:
    """The innermost part of the form that has the label: the field with its words."""
    labelled = page.locator(".schema-form-property").filter(has=page.get_by_text(f"{label} (Optional)", exact=True))
    return labelled.last


def test_the_form_has_our_choices(operation: Operation, page: Page, pictures: Path) -> None:
    open_form(operation, page)
    shows(page, "What scores an answer: the right final number, the reward model, or both", "Allow Dirty", "Overrides")
    shows(page, "Data", "The problems: of_scale takes the scale's own")
    picture(page, pictures / "prefect-form.png")
    page.get_by_role("button", name="verifier").press("ArrowDown")
    for choice in ("verifier", "reward_model", "mixture"):
        expect(page.get_by_role("listbox").get_by_text(choice, exact=True)).to_be_visible()


def test_the_form_refuses_nonsense_and_starts_nothing(operation: Operation, page: Page) -> None:
    before = operation.runs("pipeline/on-demand")
    open_form(operation, page)
    field(page, "Revision").get_by_role("textbox").fill("two words")
    page.get_by_role("button", name="Submit").click()
    shows(page, "Validation failed for field 'choices.revision'. Failure reason: 'two words' does not match")
    open_form(operation, page)
    field(page, "Overrides").get_by_role("button", name="Add item").click()
    field(page, "Overrides").get_by_role("textbox").fill("ppo.kl.coef 0.02")
    page.get_by_role("button", name="Submit").click()
    expect(field(page, "Overrides")).to_contain_text("'ppo.kl.coef 0.02' does not match")
    assert page.url.endswith("/run")  # not the page of a run
    assert operation.runs("pipeline/on-demand") == before


def test_prefect_shows_the_schedule_and_the_scheduled_run(operation: Operation, page: Page, pictures: Path) -> None:
    assert operation.night and operation.nights_to_come()
    page.goto(f"{operation.servers.prefect}/deployments/deployment/{operation.deployment('pipeline/nightly').id}")
    shows(page, "At 02:00 AM", "Completed", "auto-scheduled", operation.client.read_flow_run(operation.night).name)
    picture(page, pictures / "prefect-schedule.png")


def mlflow(operation: Operation, page: Page, place: str) -> None:
    page.goto(f"{operation.servers.mlflow}/#/{place}")
    shows(page, MODEL if "models" in place else "gsm8k-rlhf")


def test_mlflow_shows_the_curves(operation: Operation, page: Page, pictures: Path) -> None:
    run = operation.children(operation.night)["train_ppo"].info
    mlflow(operation, page, f"experiments/{run.experiment_id}/runs/{run.run_id}/model-metrics")
    shows(page, "train_ppo (accuracy)", "train_ppo (approx_kl)", "best_validation_accuracy")
    expect(page.locator("svg.main-svg .scatterlayer path.js-line").first).to_be_visible()
    picture(page, pictures / "mlflow-curves.png")


def test_mlflow_shows_the_version_with_its_aliases_and_its_card(
    operation: Operation, page: Page, pictures: Path
) -> None:
    assert operation.promotion
    mlflow(operation, page, f"models/{MODEL}/versions/1")
    metrics = operation.children(operation.night)["evaluate"].data.metrics
    shows(page, "candidate", "champion", "What it was made from", "Recipe", percent(metrics["test/policy_accuracy"]))
    picture(page, pictures / "mlflow-version.png")


def test_the_report_opens_from_mlflow(operation: Operation, page: Page, tmp_path: Path) -> None:
    run = operation.children(operation.night)["evaluate"]
    file = operation.mlflow.download_artifacts(run.info.run_id, "evaluation/index.html", str(tmp_path))
    page.goto(Path(file).as_uri())
    shows(page, "Accuracy", "Problem by problem", percent(run.data.metrics["test/policy_accuracy"]))
    assert page.locator("h1").inner_text() == page.title()
