"""The console's languages: English sources, and a catalogue of translations beside them. No Qt widgets.

``tr("Save baseline")`` gives the text in the chosen language; sources are whole sentences with ``{name}``
placeholders that the caller fills with ``str.format``. What comes from the engine or from the Qt-free middle
as finished English is matched against the catalogue's templates (`tr_engine`) and shown as it came where none
fits; knobs are looked up by their id (`knob_title`, `knob_help`). A change of language rebuilds the window
over the same models, so no widget has to know how to translate itself again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import resources

LANGUAGES = {"en": "English", "zh_CN": "简体中文"}
_CACHE_MAX = 500
_HOLE = re.compile(r"\{(\w+)\}")
_COUNTED = re.compile(
    r" (?:prompt |good )?(?:token|request|block|step|tensor|file|GPU|new one|row|client)s\b"
)


class Catalogue:
    """Texts of one language. The English one is empty: a source is its own text.

    ``texts``: sources of the console. ``templates``: texts of others, with placeholders. ``knobs``: title and
    help of each knob by its id.
    """

    def __init__(self, language: str) -> None:
        if language not in LANGUAGES:
            raise ValueError(f"unknown language {language!r}; choose one of {', '.join(LANGUAGES)}")
        self.language = language
        self.texts: dict[str, str] = {}
        self.templates: dict[str, str] = {}
        self.knobs: dict[str, list[str]] = {}
        if language != "en":
            path = Path(resources.__file__).parent / "i18n" / f"{language}.json"
            content = json.loads(path.read_text(encoding="utf-8"))
            self.texts, self.templates = content["texts"], content["templates"]
            self.knobs = content["knobs"]
        # The first that fits is taken: what ends with more words stands before what ends with a hole.
        self._patterns = [(_pattern(source), target) for source, target in self.templates.items()]
        self._cache: dict[str, str] = {}

    def text(self, source: str) -> str:
        """The translation of ``source``, or ``source``."""
        return self.texts.get(source, source)

    def foreign(self, text: str) -> str:
        """The translation of a finished text, or ``text``. Placeholders' contents are translated too."""
        if not self._patterns or not text:
            return text
        if text not in self._cache:
            if len(self._cache) >= _CACHE_MAX:
                self._cache.clear()
            self._cache[text] = self._match(text)
        return self._cache[text]

    def _match(self, text: str) -> str:
        if text in self.texts:
            return self.texts[text]
        for pattern, target in self._patterns:
            found = pattern.fullmatch(text)
            if found is not None:
                return target.format(**{key: self.foreign(value) for key, value in found.groupdict().items()})
        return text


def _pattern(template: str) -> re.Pattern[str]:
    """A template as a regular expression with one group for each placeholder.

    What is counted right behind a placeholder may also be one: ``{n} tokens`` fits "1 token".
    """
    parts = _HOLE.split(template)
    made = [_literal(part) if i % 2 == 0 else f"(?P<{part}>.+?)" for i, part in enumerate(parts)]
    return re.compile("".join(made), re.DOTALL)


def _literal(part: str) -> str:
    counted = _COUNTED.match(part)
    if counted is None:
        return re.escape(part)
    end = counted.end()
    return f"{re.escape(part[:end])}?{re.escape(part[end:])}"


_current = Catalogue("en")


def use(language: str) -> None:
    """Make ``language`` the one that `tr` answers in. Raises ValueError where it is unknown."""
    global _current
    _current = Catalogue(language)


def language() -> str:
    """The language in use: ``en`` or ``zh_CN``."""
    return _current.language


def tr(source: str) -> str:
    """``source`` in the language in use. ``source`` must be a literal, so that a test can find them all."""
    return _current.text(source)


def tr_n(one: str, many: str, n: float) -> str:
    """``one`` of a single thing, else ``many``, in the language in use; Chinese has ``many`` alone."""
    return one if n == 1 and _current.language == "en" else _current.text(many)


def N_(source: str) -> str:
    """Mark a literal that is translated later by `tr_later`; returns it as it is."""
    return source


def tr_later(source: str) -> str:
    """The translation of a text that was marked by `N_` where it was written down."""
    return _current.text(source)


def tr_engine(text: str) -> str:
    """A finished English text of the engine or the Qt-free middle, translated where a template fits."""
    return _current.foreign(text)


def knob_title(knob: str, title: str) -> str:
    """The name of the knob with this id; ``title`` is the engine's own."""
    return _current.knobs[knob][0] if knob in _current.knobs else title


def knob_help(knob: str, text: str) -> str:
    """What the knob with this id does; ``text`` is the engine's own."""
    return _current.knobs[knob][1] if knob in _current.knobs else text


def pick(system_locale: str) -> str:
    """The language for a locale name such as ``zh_CN.UTF-8``; English where there is no better one."""
    return "zh_CN" if system_locale.lower().startswith("zh") else "en"
