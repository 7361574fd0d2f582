# In a checkout, as there is no release on a package index yet:
make demo                         # installs into .venv, and answers a question
pip install -e ".[serve,gguf]"    # or into an environment of your own
pip install git+URL               # or without a checkout; URL is the repository's
