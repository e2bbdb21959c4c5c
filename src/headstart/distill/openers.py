"""First words of requests, in our own words: they steer a model that writes its own prompts to all kinds of tasks.

Knows: nothing but words. Does not know: who writes the rest. Half of all prompts should start without any.
"""

from __future__ import annotations

__all__ = ["OPENERS"]

_TALK = """
How do I|What should I|Can you explain|Why do|Why is|What is the difference between|Tell me about|I feel
My friend|Give me|Give me five|Write a short|Write a letter|Write an email|Write a poem about
Write a story about|Help me|Imagine|Describe|Suggest|List|Compare|Plan|Who was|When did|Where can|Is it
Could you|Please|Explain to a child|What are the benefits of|Write a dialogue between|Give advice
Make a list of|What happens if|Create a|I am learning
"""

_TEXT = """
Translate this into French:\\n\\n|Translate into Spanish: |Translate the sentence to German:\\n
Say this in Italian: "|Translate this into English:\\n\\n|How do you say|Summarize the following text:\\n\\n
Summarize this in two sentences:\\n\\n|Write a short summary of this article.\\n\\n
Give me the main points of this text:\\n\\n|Shorten this paragraph:\\n\\n
Rewrite this text in simple words:\\n\\n|Rewrite the sentence|Correct the grammar:\\n\\n
Make this more polite:\\n\\n|Here is a text:\\n\\n|Use the following passage to answer.\\n\\nPassage: 
Context: |Read this:\\n\\n|Based on the text below,|Extract the names from this text:\\n\\n
Turn these notes into a paragraph:\\n\\n-|Continue this story:\\n\\n
"""

_NUMBERS = """
If a train|A shop sells|How many|Calculate|What is 1|What is 2|Solve|A farmer has|Maria has|Tom buys
A car drives|A recipe needs|Find the average|What percentage|How much does it cost|There are|Each box holds
A rectangle|Convert|Solve step by step:|Anna earns|In a class of
"""

_CODE = """
Write a Python function|Write a function that|Write a program|Fix this code:\\n\\n```python\\ndef
Rename the variable in this code:\\n\\n```python\\n|Add a docstring to this function:\\n\\n```python\\ndef
Change this function so that it\\n|What does this code do?\\n\\n```python\\n
Add comments to this code:\\n\\n```python\\n
Here is my class. Add a method and give the whole code.\\n\\n```python\\nclass
Rewrite this loop and repeat the whole function:\\n\\n```python\\ndef|Write a SQL query
Write a test for\\n\\n```python\\ndef|Write an HTML page|Write a JavaScript function
Add error handling to this:\\n\\n```python\\ndef|Write a bash script
"""


def _words(block: str) -> list[str]:
    found = [part.replace("\\n", "\n") for line in block.strip().splitlines() for part in line.split("|")]
    return [part for part in found if part]


#: each with the blank or line break it ends in, if the next token would not bring its own
OPENERS: tuple[str, ...] = tuple(word for block in (_TALK, _TEXT, _NUMBERS, _CODE) for word in _words(block))
