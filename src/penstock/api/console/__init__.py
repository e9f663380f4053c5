"""The console: the management API in a browser, at `/console`.

A page builder adds a module with a `PAGE` (see `page`), a folder of templates with its name, and a line
in `pages`. `app` does the rest: sessions, CSRF, roles, headers, errors.
"""
