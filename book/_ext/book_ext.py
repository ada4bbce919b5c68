"""What the book adds to Sphinx: local mathematics, figures for dark mode, the claims ledger."""

import re
from importlib.util import find_spec
from pathlib import Path

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

BOOK = Path(__file__).resolve().parents[1]
VERDICTS = {
    "holds": "success",
    "holds after correction": "warning",
    "fails": "danger",
    "reproduced": "success",
    "not reproduced": "danger",
    "open": "secondary",
}


def read_claims() -> list[dict]:
    """Return the ledger, one dict a claim: id, source, statement, verdict, chapter."""
    return yaml.safe_load((BOOK / "claims.yml").read_text(encoding="utf-8"))


def local_mathjax(app: Sphinx, config) -> None:
    """Serve MathJax from the site itself, so that pages render with no network."""
    spec = find_spec("mathjax")
    if spec is None:
        raise RuntimeError("MathJax's files are missing: pip install django-static-mathjax")
    package = Path(next(iter(spec.submodule_search_locations)))
    script = package / "static" / "mathjax" / "es5" / "tex-svg-full.js"
    config.html_static_path = [*config.html_static_path, str(script)]
    config.mathjax_path = script.name


def fill_address(app: Sphinx, docname: str, source: list[str]) -> None:
    """Print the repository's address, which stands in _config.yml only."""
    address = app.config.html_theme_options["repository_url"]
    source[0] = source[0].replace("REPOSITORY_ADDRESS", address)


def anchor_claims(app: Sphinx, doctree: nodes.document) -> None:
    """Give the cell tagged ``claim-ID`` the anchor ``#claim-ID``."""
    for cell in doctree.findall(nodes.container):
        for name in cell.get("classes", []):
            if name.startswith("tag_claim-"):
                cell["ids"].append(name.removeprefix("tag_").lower())


class ClaimDirective(SphinxDirective):
    """``{claim} ID``: the statement and its verdict, from the ledger."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(BOOK / "claims.yml"))
        wanted = self.arguments[0]
        claim = next((c for c in read_claims() if c["id"] == wanted), None)
        if claim is None:
            raise self.error(f"claim {wanted!r} is not in claims.yml")
        return self.parsed(card(claim, link=f"#claim-{wanted.lower()}"))

    def parsed(self, text: str) -> list[nodes.Node]:
        holder = nodes.Element()
        self.state.nested_parse(text.splitlines(), self.content_offset, holder)
        return holder.children


class ClaimsDirective(ClaimDirective):
    """``{claims}``: the whole ledger, chapter by chapter."""

    required_arguments = 0

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(BOOK / "claims.yml"))
        chapters: dict[str, list[dict]] = {}
        for claim in read_claims():
            chapters.setdefault(claim["chapter"], []).append(claim)
        out = []
        for chapter, claims in chapters.items():
            page = self.env.relfn2path(f"/book/{chapter}.md")[0].removesuffix(".md")
            here = Path(self.env.docname).parent
            target = Path(page).relative_to(here).as_posix()
            text = f"**{{doc}}`/{page}`**\n\n"
            text += "\n\n".join(
                card(c, link=f"{target}.html#claim-{c['id'].lower()}") for c in claims
            )
            out += self.parsed(text)
        return out


def card(claim: dict, *, link: str) -> str:
    """Return the MyST text of one claim's card."""
    badge = f"{{bdg-{VERDICTS[claim['verdict']]}}}`{claim['verdict']}`"
    statement = " ".join(claim["statement"].split())
    return (
        f":::::{{div}} claim\n"
        f'<a class="claim-id" href="{link}">{claim["id"]}</a> {badge}\n'
        f"{statement}\n"
        f"[{claim['source']}]{{.claim-source}}\n"
        ":::::\n"
    )


IMAGE = re.compile(r'<img\b[^>]*\bsrc="(?P<src>[^"]*_images/[^"]+)\.svg"[^>]*>')


def pair_figures(app: Sphinx, pagename, templatename, context, doctree) -> None:
    """Show each SVG figure twice, inked for light and for dark mode; CSS picks one."""

    def pair(match: re.Match) -> str:
        tag = match.group(0)
        dark = tag.replace(match["src"] + ".svg", match["src"] + "-dark.svg")
        return _with_class(tag, "ink-light") + _with_class(dark, "ink-dark dark-light")

    if "body" in context:
        context["body"] = IMAGE.sub(pair, context["body"])


def _with_class(tag: str, name: str) -> str:
    if 'class="' in tag:
        return tag.replace('class="', f'class="{name} ', 1)
    return tag.replace("<img", f'<img class="{name}"', 1)


def write_dark_figures(app: Sphinx, exception: Exception | None) -> None:
    """Write the dark twin of each SVG figure."""
    if exception or app.builder.format != "html":
        return
    from flatbook.plotting import darken

    for light in Path(app.outdir, "_images").glob("*.svg"):
        if light.stem.endswith("-dark"):
            continue
        dark = light.with_name(f"{light.stem}-dark.svg")
        if not dark.exists() or dark.stat().st_mtime < light.stat().st_mtime:
            dark.write_text(darken(light.read_text(encoding="utf-8")), encoding="utf-8")


def without_thebe(app: Sphinx, pagename, templatename, context, doctree) -> None:
    """Leave out the scripts of Thebe, which the theme brings, twice, and the book does not use."""
    context["script_files"] = [
        script
        for script in context.get("script_files", [])
        if "thebe" not in f"{script}{getattr(script, 'attributes', '')}".lower()
    ]


def local_lab_button(app: Sphinx, pagename, templatename, context, doctree) -> None:
    """Add JupyterLab on the reader's own machine to the launch menu."""
    for group in context.get("header_buttons", []):
        if group.get("label") == "launch-buttons":
            group["buttons"].append(
                {
                    "type": "link",
                    "text": "JupyterLab",
                    "tooltip": "Run in JupyterLab on your machine",
                    "icon": "fas fa-laptop-code",
                    "url": context["pathto"]("book/index").rstrip("#") + "#run-it",
                }
            )


def setup(app: Sphinx) -> dict:
    app.connect("config-inited", local_mathjax, priority=100)
    app.connect("source-read", fill_address)
    app.connect("doctree-read", anchor_claims)
    # After the theme has built its buttons (501) and before the page is written.
    app.connect("html-page-context", local_lab_button, priority=900)
    app.connect("html-page-context", pair_figures, priority=901)
    app.connect("html-page-context", without_thebe, priority=902)
    app.connect("build-finished", write_dark_figures)
    app.add_directive("claim", ClaimDirective)
    app.add_directive("claims", ClaimsDirective)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
