"""``silo budget --html``: one page with a picture for each ledger, that needs nothing else."""

from __future__ import annotations

from html import escape

from medsilo.privacy.pages.plots import spending
from medsilo.privacy.pages.wording import shown
from medsilo.silo.oversight.budget import AccountView, Part, lines, titled

_STYLE = (
    "body{font-family:sans-serif;max-width:44rem;margin:2rem auto;padding:0 1rem;color:#1b2733}"
    "svg{width:100%;height:auto}table{border-collapse:collapse;margin:1rem 0}caption{text-align:left;font-weight:bold}"
    "th,td{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #8b98a3}.number{text-align:right}"
)


def to_html(silo: str, accounts: list[AccountView]) -> str:
    """The page; ``accounts`` as ``medsilo.silo.oversight.budget.read_accounts`` gives them."""
    title = f"Privacy loss at {escape(silo)}"
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>',
        f"<h1>{title}</h1>",
    ]
    if not accounts:
        parts.append(
            "<p>There is no privacy ledger: nothing was trained with differential privacy. What is learnt from "
            "what was learnt from models without it has no bound.</p>"
        )
    for number, account in enumerate(accounts):
        subject = account.subject
        parts.append(f"<h2>Data set {escape(subject.data_sha256[:16])}, split {escape(subject.split)}</h2>")
        parts.extend(f"<p>{escape(line)}</p>" for line in lines(account))
        parts.append(spending(account.course, account.budget, identifier=f"account{number}"))
        parts.extend(_table(title, rows) for title, rows in titled(account))
    return "\n".join(parts) + "</html>\n"


def _table(title: str, rows: tuple[Part, ...]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(row.name)}</th><td class="number">{row.charges}</td>'
        f'<td class="number">{shown(row.epsilon)}</td></tr>'
        for row in rows
    )
    head = f'<tr><th scope="col">{title}</th><th scope="col">charges</th><th scope="col">ε alone</th></tr>'
    return f"<table><caption>By {title}</caption>{head}{body}</table>"
