"""An e-mail (.eml): who wrote to whom, and the text. What is attached is named, not read."""

from __future__ import annotations

import email
from collections.abc import Iterator
from email import policy
from email.message import EmailMessage

from nemolocal.documents.limits import Limits
from nemolocal.documents.load import html
from nemolocal.documents.load.source import OnPage, Source, display_name
from nemolocal.documents.load.text import clean, decode, paragraphs
from nemolocal.documents.parts import Block, Document, NotRead

_HEADERS = ("From", "To", "Cc", "Date", "Subject")


def read(source: Source, limits: Limits, on_page: OnPage) -> Document:
    try:
        message = email.message_from_bytes(source.data(), policy=policy.default)
        assert isinstance(message, EmailMessage)
        head = [f"{name}: {clean(str(message[name]))}" for name in _HEADERS if message[name]]
        body = tuple(_body(message))
        attached = [part.get_filename() or part.get_content_type() for part in message.iter_attachments()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise source.damaged(error) from None
    on_page(1, 1)
    blocks = (Block("paragraph", "\n".join(head)), *body) if head else body
    return Document(
        name=source.name,
        kind="mail",
        sha256=source.sha256,
        blocks=blocks,
        title=clean(str(message["Subject"] or "")),
        not_read=tuple(
            NotRead(0, f"the attachment {display_name(name)}; save and add it") for name in attached
        ),
    )


def _body(message: EmailMessage) -> Iterator[Block]:
    part = message.get_body(preferencelist=("plain", "html"))
    if part is None:
        return
    try:
        text = part.get_content()
    except LookupError:  # an encoding that nobody knows
        text = decode(bytes(part.get_payload(decode=True)))
    if not isinstance(text, str):
        return
    if part.get_content_subtype() == "html":
        yield from html.blocks(html.parse(text))
    else:
        yield from (block for _, block in paragraphs(clean(text)))
