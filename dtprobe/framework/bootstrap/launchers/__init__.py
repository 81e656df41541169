"""One launcher a module: `claim(environ)` reads its variables, `runs_inside` proves that it was started by another one."""
