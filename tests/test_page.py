"""The page at `/`: what the daemon serves, and how it behaves in a real browser."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from edgeqwen.http.page import page, page_headers
from tests.browser import PROGRAM, Tab, browser
from tests.daemons import DaemonProcess, running_daemon, script_of

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")
TALK = "[...document.querySelectorAll('.turn')].map((each) => each.innerText)"
PICTURES = os.environ.get("EDGEQWEN_TEST_PICTURES", "")


def ask(daemon: DaemonProcess, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=20)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    response.body = response.read()  # type: ignore[attr-defined] # the connection goes, the answer stays
    connection.close()
    return response


def test_the_page_is_one_file_that_asks_for_nothing_from_elsewhere() -> None:
    text = page().decode()
    assert not re.findall(r"(?:src|href|action)=[\"'](?!data:)", text)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "innerHTML" not in text
    assert len(re.findall(r"<script", text)) == len(re.findall(r"<style", text)) == 1
    assert not re.findall(r"\son[a-z]+=", text), "the policy would refuse it"
    assert len(page()) < 40_000


def test_it_is_served_with_a_policy_and_not_twice_to_the_same_browser() -> None:
    with running_daemon("fake:", "--http", "127.0.0.1:0") as daemon:
        found = ask(daemon, "GET", "/")
        assert found.status == 200
        assert found.body == page()  # type: ignore[attr-defined]
        policy = found.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert found.headers["X-Content-Type-Options"] == "nosniff"
        head = ask(daemon, "HEAD", "/")
        assert (head.status, head.headers["Content-Length"]) == (200, str(len(page())))
        again = ask(daemon, "GET", "/", **{"If-None-Match": found.headers["ETag"]})
        assert (again.status, again.body) == (304, b"")  # type: ignore[attr-defined]
        refused = ask(daemon, "POST", "/")
        assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")
        assert ask(daemon, "GET", "/favicon.ico").status == 204
        assert ask(daemon, "GET", "/", **{"Sec-Fetch-Site": "cross-site"}).status == 403
        assert page_headers()["ETag"] == found.headers["ETag"]


@asynccontextmanager
async def opened(daemon: DaemonProcess) -> AsyncIterator[Tab]:
    """The page of a daemon, which must not complain in the end."""
    async with browser() as tab:
        await tab.resize(1000, 760)
        await tab.open(f"http://127.0.0.1:{await asyncio.to_thread(lambda: daemon.http_port)}/")
        await tab.until("document.querySelector('#state').dataset.state === 'ready'")
        yield tab
        assert tab.faults == []


async def picture(tab: Tab, name: str) -> None:
    if PICTURES:
        await tab.screenshot(Path(PICTURES) / f"{name}.png")


@needs_browser
async def test_an_answer_streams_in_with_its_thought_folded_and_its_figures() -> None:
    answer = "<think>\nI think of a river.\n</think>\n\nA `river` flows.\n\n```\nx < 1\n```\nThe end."
    with running_daemon(script_of(answer, step_s=0.02), "--http", "127.0.0.1:0") as daemon:
        async with opened(daemon) as tab:
            await tab.eval("document.querySelector('#think').value = 'on'")
            await tab.eval("document.querySelector('#think').dispatchEvent(new Event('input'))")
            await tab.type("Tell me of rivers")
            partial = await tab.until("running && document.querySelector('.answer p')?.innerText")
            assert "The end." not in partial
            await tab.until("!running && document.querySelector('.answer .facts').innerText.includes('tokens/s')")
            assert await tab.eval("document.querySelector('.answer details').open") is False
            assert re.match(r"Thought for \d", await tab.eval("document.querySelector('summary').innerText"))
            assert (
                await tab.eval("document.querySelector('.answer details div').textContent.trim()")
                == "I think of a river."
            )
            assert await tab.eval("document.querySelector('.answer pre').innerText.trim()") == "x < 1"
            assert await tab.eval("document.querySelector('.answer code').innerText") == "river"
            facts = await tab.eval("document.querySelector('.answer .facts').innerText")
            assert re.search(r"first after \d.* tokens\n?.*of it cached", facts, re.DOTALL)
            assert re.search(
                r"\d+ running · \d+ waiting", await tab.until("document.querySelector('#figures').innerText")
            )
            await picture(tab, "answer")
            await tab.dark()
            await tab.resize(390, 780)
            await picture(tab, "phone")
            assert await tab.eval("document.documentElement.scrollWidth <= innerWidth"), "nothing stands out on a phone"


@needs_browser
async def test_the_conversation_goes_on_and_is_still_there_after_a_reload() -> None:
    with running_daemon(script_of("one", "two"), "--http", "127.0.0.1:0") as daemon:
        async with opened(daemon) as tab:
            for number, text in enumerate(("first", "second"), 1):
                await tab.type(text)
                await tab.until(f"!running && document.querySelectorAll('.answer .facts span').length >= {number}")
            talk = await tab.eval(TALK)
            assert [each.split("\n")[0] for each in talk] == ["first", "one", "second", "two"]
            await tab.call("Page.reload")
            await tab.until("document.querySelectorAll('.turn').length === 4")
            await tab.eval("document.querySelector('#fresh').click()")
            assert await tab.eval(TALK) == []


@needs_browser
async def test_stop_ends_the_request_on_the_daemon() -> None:
    with running_daemon(script_of("word " * 40, step_s=0.1), "--http", "127.0.0.1:0") as daemon:
        async with opened(daemon) as tab:
            await tab.type("Go on for long")
            await tab.until("!!document.querySelector('.answer p')")
            await tab.eval("document.querySelector('#stop').click()")
            await tab.until("!running && document.querySelector('.facts').innerText.includes('stopped')")
            await asyncio.to_thread(daemon.wait_for, running=0, queued=0)
            assert " code=cancelled " in daemon.log


@needs_browser
async def test_what_a_model_writes_is_text_and_never_runs() -> None:
    hostile = '<img src=x onerror="window.ran = 1"><script>window.ran = 1</script> `<b>` \n\n```\n</code><i>\n```'
    with running_daemon(script_of(hostile), "--http", "127.0.0.1:0") as daemon:
        async with opened(daemon) as tab:
            await tab.type("<script>window.ran = 2</script>")
            await tab.until("!running && !!document.querySelector('.answer pre')")
            assert await tab.eval("window.ran") is None
            assert await tab.eval("document.querySelectorAll('.turn img, .turn script, .turn b, .turn i').length") == 0
            assert "<img src=x" in await tab.eval("document.querySelector('.answer').innerText")


@needs_browser
async def test_an_error_is_told_in_words_and_can_be_tried_again() -> None:
    with running_daemon(script_of("fine", fail_at_step=[1]), "--http", "127.0.0.1:0") as daemon:
        async with opened(daemon) as tab:
            await tab.type("hi")
            fault = await tab.until("document.querySelector('.fault')?.innerText")
            assert "The engine failed" in fault
            await tab.eval("document.querySelector('.again').click()")
            await tab.until("!running && document.querySelector('.answer p')?.innerText === 'fine'")
            assert await tab.eval("document.querySelectorAll('.turn').length") == 2


@needs_browser
async def test_a_key_is_asked_for_where_the_daemon_wants_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    keys.chmod(0o600)
    environ = {"EDGEQWEN_HTTP_API_KEY_FILE": str(keys)}
    with running_daemon(script_of("fine"), "--http", "127.0.0.1:0", environ=environ) as daemon:
        async with opened(daemon) as tab:
            await tab.type("hi")
            await tab.until("document.querySelector('#settings').open")
            await tab.eval("document.querySelector('#key').value = '0123456789abcdef'")
            await tab.eval("document.querySelector('#key').dispatchEvent(new Event('input'))")
            await picture(tab, "settings")
            await tab.eval("document.querySelector('#settings').close()")
            await tab.eval("document.querySelector('.again').click()")
            await tab.until("!running && document.querySelector('.answer p')?.innerText === 'fine'")
            tab.faults[:] = [fault for fault in tab.faults if "401" not in fault]


@needs_browser
async def test_a_daemon_that_goes_away_is_noticed_and_found_again(tmp_path: Path) -> None:
    port = 0
    with running_daemon(script_of("fine"), "--http", "127.0.0.1:0") as daemon:
        port = await asyncio.to_thread(lambda: daemon.http_port)
        async with browser() as tab:
            await tab.open(f"http://127.0.0.1:{port}/")
            await tab.until("document.querySelector('#state').dataset.state === 'ready'")
            daemon.process.terminate()
            await asyncio.to_thread(daemon.wait)
            await tab.until("document.querySelector('#state').dataset.state === 'lost'")
            with running_daemon(script_of("fine"), "--http", f"127.0.0.1:{port}"):
                await tab.until("document.querySelector('#state').dataset.state === 'ready'")
