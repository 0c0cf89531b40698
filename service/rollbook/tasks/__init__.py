"""Where tasks come from, how prompts are made of them and how completions are judged. Imports core, observe and rpc."""
