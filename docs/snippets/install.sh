# In a checkout, as there is no release on a package index yet:
make demo                         # installs into .venv, and answers a question
. .venv/bin/activate              # or an environment of your own
pip install -e ".[serve,gguf]"    # with the server, and GGUF files
pip install git+URL               # or without a checkout; URL is the repository's
