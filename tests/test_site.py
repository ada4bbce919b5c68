"""The built site in a real browser: light, dark and at phone width, with no network."""

import functools
import http.server
import os
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import unquote, urljoin, urlparse

import pytest

ROOT = Path(__file__).resolve().parents[1]
HTML = ROOT / "_build" / "html"
BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
VIEWS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
PAGES = sorted(p.relative_to(HTML).as_posix() for p in (HTML / "book").rglob("*.html"))

pytestmark = [
    pytest.mark.site,
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="session")
def site():
    """Serve the site on this machine and return its address."""
    if not HTML.exists():
        pytest.fail("build the book first: make book")
    handler = functools.partial(_Quiet, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def browser():
    if BROWSER is None:
        reason = "no Chromium on this machine: install it or set CHROMIUM to its path"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page that has been opened, with everything that went wrong on the way."""

    def __init__(self, browser, site, view):
        self.page = browser.new_page(**VIEWS[view])
        self.errors = []
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.route("**/*", functools.partial(self._only_local, site))
        mode = "dark" if view == "dark" else "light"
        self.page.add_init_script(
            f"localStorage.setItem('mode', '{mode}'); localStorage.setItem('theme', '{mode}')"
        )

    def _only_local(self, site, route):
        if route.request.url.startswith((site, "data:", "blob:")):
            route.continue_()
        else:
            self.errors.append(f"asked the network for {route.request.url}")
            route.abort()

    def open(self, address):
        self.page.goto(address, wait_until="load")
        self.page.wait_for_function(
            "() => !window.MathJax || !MathJax.startup || !MathJax.startup.promise"
            " || MathJax.startup.promise.then(() => true)"
        )
        return self.page


@pytest.fixture
def visit(browser, site):
    opened = []

    def visit(name, view="light"):
        one = Visit(browser, site, view)
        opened.append(one)
        one.open(site + name)
        return one

    yield visit
    for one in opened:
        one.page.close()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole(visit, name, view):
    one = visit(name, view)
    page = one.page
    page.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    page.wait_for_timeout(150)
    assert one.errors == []
    assert page.evaluate("document.documentElement.dataset.theme") == (
        "dark" if view == "dark" else "light"
    )

    # Mathematics: everything rendered, nothing left over, no error.
    text = page.evaluate(
        """() => { const body = document.querySelector('article').cloneNode(true);
        body.querySelectorAll('pre, code, script, mjx-container').forEach(e => e.remove());
        return body.textContent }"""
    )
    assert "$" not in text
    assert not re.search(r"\\\(|\\\[|\{(glue|doc|ref|eq|prf)[:}]|\[\^|```", text)
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    if page.locator(".math").count():
        assert page.locator("mjx-container").count() >= page.locator(".math").count()

    # Figures: loaded, described, one of each light and dark pair visible.
    for image in page.locator("article img").all():
        state = image.evaluate(
            "i => [i.complete && i.naturalWidth > 0, i.alt, getComputedStyle(i).display, "
            "i.className]"
        )
        loaded, alt, display, names = state
        assert loaded
        assert alt.strip()
        hidden = ("ink-dark" if view != "dark" else "ink-light") in names
        assert (display == "none") == hidden

    captions = page.locator("article figcaption")
    assert all(captions.nth(i).is_visible() for i in range(captions.count()))

    if view == "light":  # on a desktop nothing has to be scrolled sideways to be read
        wide = page.evaluate(
            """() => [...document.querySelectorAll('article div.math mjx-container, article pre')]
            .filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 4)
            .map(e => e.textContent.slice(0, 80))"""
        )
        assert wide == []

    # Nothing sticks out sideways.
    assert page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth + 1"
    )


@pytest.mark.parametrize("name", PAGES)
def test_internal_links_resolve(visit, site, name):
    page = visit(name).page
    for link in page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)"):
        if not link.startswith(site):
            continue
        target = urlparse(link)
        file = HTML / unquote(target.path).lstrip("/")
        file = file / "index.html" if file.is_dir() else file
        assert file.exists(), link
        if target.fragment and file.suffix == ".html":
            anchor = re.escape(unquote(target.fragment))
            found = re.search(rf"""\bid=["']{anchor}["']""", file.read_text(encoding="utf-8"))
            generated = target.fragment.startswith("mjx-eqn")
            assert found or generated, link


def test_home_page_redirects_to_the_book(visit, site):
    page = visit("index.html").page
    page.wait_for_url(urljoin(site, "book/index.html"))
    assert "What Flatness Buys" in page.title()


def test_search_finds_relative_sharpness(visit):
    page = visit("search.html?q=relative+sharpness").page
    page.wait_for_selector("#search-results li", timeout=15_000)
    found = page.locator("#search-results li a").evaluate_all("links => links.map(a => a.href)")
    assert any("flatness/invariance.html" in link for link in found)


def test_solution_opens_on_click(visit):
    page = visit("book/flatness/hessian.html").page
    solution = page.locator(".solution.dropdown, .solution.admonition").first
    body = solution.locator("p:not(.admonition-title)").first
    assert not body.is_visible()
    solution.locator("button.toggle-button").first.click()
    body.wait_for(state="visible", timeout=5_000)


def test_hidden_code_opens_on_click(visit):
    page = visit("book/flatness/hessian.html").page
    details = page.locator("details.hide").first
    assert not details.locator("pre").first.is_visible()
    details.locator("summary").first.click()
    assert details.locator("pre").first.is_visible()


def test_theme_switch_changes_the_figure(visit):
    page = visit("book/flatness/hessian.html").page
    figure = page.locator("figure img")
    assert [figure.nth(i).is_visible() for i in range(2)] == [True, False]
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    assert [figure.nth(i).is_visible() for i in range(2)] == [False, True]


def test_launch_edit_and_issue_links_follow_from_the_one_address(visit):
    import yaml

    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    address = config["repository"]["url"]
    owner = address.removeprefix("https://github.com/")
    page = visit("book/flatness/hessian.html").page
    links = page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)")
    notebook = "book/flatness/hessian.ipynb"
    assert f"https://colab.research.google.com/github/{owner}/blob/main/{notebook}" in links
    assert any("mybinder.org" in link and owner in link and notebook in link for link in links)
    assert any("/index.html#run-it" in link for link in links)
    assert f"{address}/edit/main/book/flatness/hessian.md" in links
    assert any(link.startswith(f"{address}/issues/new") for link in links)


def test_every_claim_of_the_ledger_leads_to_its_cell(visit):
    page = visit("book/claims.html").page
    links = page.locator("a.claim-id").evaluate_all("links => links.map(a => a.href)")
    assert len(links) >= 18
    for link in links:
        page.goto(link)
        cell = page.locator(f"[id='{urlparse(link).fragment}']")
        assert cell.count() == 1
        assert "assert" in cell.inner_text()
