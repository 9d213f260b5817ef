"""Builds the sample bundles: ``python -m samples.build [NAME...] [-o DIR]``.

This is a package, not a folder of scripts, because two of its modules are named after the
libraries they drive: run as scripts, ``coreai.py`` would hide the library ``coreai``.
"""
