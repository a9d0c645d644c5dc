"""``weightformer demo``: the whole library on handwritten digits in three minutes, told in one illustrated page."""

from weightformer.demo.run import run

__all__ = ["run"]
