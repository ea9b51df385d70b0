"""The API client on bad days: rate limits, outages, lost answers."""

import httpx
import pytest
from fake_github import SHA, FakeGitHub, run_payload

from ci.errors import GitHubError

OUTAGE = (502, {"message": "Server Error"}, {})
LOST = httpx.ReadTimeout("no answer")


def test_reads_are_repeated_through_an_outage(fake: FakeGitHub) -> None:
    for trouble in (OUTAGE, LOST, httpx.ConnectError("refused")):
        fake.fail("GET .*/pulls/5", trouble)
    assert fake.client().pull_request(5).head.sha == SHA
    assert fake.slept == [1.0, 2.0, 4.0]


def test_an_outage_that_lasts_is_an_error_with_its_cause(fake: FakeGitHub) -> None:
    for _ in range(4):
        fake.fail("GET .*/pulls/5", OUTAGE)
    with pytest.raises(GitHubError, match="GitHub answered GET /pulls/5 with 502") as caught:
        fake.client().pull_request(5)
    assert caught.value.status == 502


def test_a_refusal_is_not_repeated(fake: FakeGitHub) -> None:
    fake.fail("GET .*/pulls/5", (422, {"message": "Validation `Failed`"}, {}))
    with pytest.raises(GitHubError, match=r"422: `.*Validation \?Failed\?"):
        fake.client().pull_request(5)
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("headers", "waited"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1000042"}, 42.0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "999000"}, 1.0),
    ],
)
def test_rate_limits_are_waited_out(fake: FakeGitHub, headers: dict[str, str], waited: float) -> None:
    fake.fail("GET .*/pulls/5", (403, {"message": "rate limit exceeded"}, headers))
    fake.fail("POST .*/dispatches", (429, {"message": "secondary rate limit"}, headers))
    client = fake.client()
    assert client.pull_request(5).number == 5
    assert client.dispatch("w.yml", "main", {"ticket": "t"}, "t") is not None
    assert fake.slept == [waited, waited]
    assert len(fake.dispatches) == 1


def test_a_rate_limit_beyond_patience_says_how_long(fake: FakeGitHub) -> None:
    fake.fail("GET", (403, {"message": "no"}, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1003600"}))
    with pytest.raises(GitHubError, match="asks to wait 3600 s"):
        fake.client().pull_request(5)
    assert fake.slept == []


def test_a_plain_403_is_a_refusal_and_not_a_rate_limit(fake: FakeGitHub) -> None:
    fake.fail("GET", (403, {"message": "Resource not accessible by integration"}, {"x-ratelimit-remaining": "4999"}))
    with pytest.raises(GitHubError, match="Resource not accessible"):
        fake.client().pull_request(5)


@pytest.mark.parametrize("trouble", [OUTAGE, LOST])
@pytest.mark.parametrize("carried_out", [True, False])
def test_what_must_happen_once_happens_once(fake: FakeGitHub, trouble: object, carried_out: bool) -> None:
    """A lost answer to a dispatch or a comment may hide that it was carried out."""
    fake.fail("POST .*/dispatches", trouble, carried_out=carried_out)  # type: ignore[arg-type]
    fake.fail("POST .*/issues/5/comments", trouble, carried_out=carried_out)  # type: ignore[arg-type]
    fake.fail("POST .*/rerun-failed-jobs", trouble, carried_out=carried_out)  # type: ignore[arg-type]
    fake.runs = [run_payload(1, "pull-request", "x", "completed", "failure")]
    client = fake.client()
    run = client.dispatch("w.yml", "main", {"ticket": "t-1"}, "t-1")
    assert run is not None
    assert run.display_title == "w t-1"
    client.comment(5, "text", "mark")
    client.rerun_failed_jobs(client.failed_runs(SHA)[0])
    assert (len(fake.dispatches), len(fake.comments), fake.rerun) == (1, 1, [1])


def test_a_run_that_is_not_listed_in_time_is_none(fake: FakeGitHub) -> None:
    fake.lists_runs = False
    assert fake.client().dispatch("w.yml", "main", {"ticket": "t"}, "t") is None
    assert fake.slept == [2.0] * 5


def test_only_failed_runs_are_failed_runs(fake: FakeGitHub) -> None:
    conclusions = ["success", "failure", "timed_out", "cancelled", "skipped", "neutral"]
    fake.runs = [run_payload(index, "n", "t", "completed", end) for index, end in enumerate(conclusions)]
    fake.runs.append(run_payload(9, "n", "t", "in_progress", None))
    assert [run.conclusion for run in fake.client().failed_runs(SHA)] == ["failure", "timed_out", "cancelled"]


def test_strangers_have_no_role_and_odd_names_stay_in_their_path_segment(fake: FakeGitHub) -> None:
    assert fake.client().role("nobody") == "none"
    assert fake.client().role("../../pulls/5") == "none"
    assert fake.client().role("writer") == "write"


def test_an_answer_of_another_shape_is_an_error(fake: FakeGitHub) -> None:
    fake.fail("GET", (200, {"number": "five"}, {}))
    with pytest.raises(GitHubError, match="has another shape"):
        fake.client().pull_request(5)


def test_a_comment_is_cut_to_what_github_takes(fake: FakeGitHub) -> None:
    fake.client().comment(5, "x" * 100_000, "mark")
    assert fake.answer.endswith("<!-- mark -->")


def test_a_stranger_cannot_pass_for_our_answer(fake: FakeGitHub) -> None:
    """E05: the marker of an answer can be guessed."""
    fake.chatter = [{"id": 1, "body": "<!-- ci:c1 -->", "user": {"login": "stranger", "id": 9, "type": "User"}}]
    fake.fail("POST .*/issues/5/comments", LOST)
    fake.client().comment(5, "Not done.", "ci:c1")
    assert fake.answer.startswith("Not done.")
