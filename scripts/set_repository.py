"""Set the repository's address and branch in _config.yml and carry it into the notebooks."""

import argparse
import re
import sys

import sync_notebooks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="such as https://github.com/OWNER/NAME")
    parser.add_argument("branch", nargs="?", default="main")
    options = parser.parse_args()
    address = options.address.removesuffix(".git").rstrip("/")
    if not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", address):
        sys.exit(f"address must look like https://github.com/OWNER/NAME; got {address!r}")
    path = sync_notebooks.ROOT / "_config.yml"
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"(?m)^  url: .*$", f"  url: {address}", text, count=1)
    text = re.sub(r"(?m)^  branch: .*$", f"  branch: {options.branch}", text, count=1)
    path.write_text(text, encoding="utf-8")
    for file, content in sync_notebooks.stale().items():
        file.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
