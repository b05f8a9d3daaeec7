"""The first words of questions of many kinds, which a model continues: these, and no data set."""

KINDS = {
    "any": "",
    "explain": "Explain why|Explain how|What is the difference between|How does|Why do|"
    "What happens when|Describe the main|In simple words, what is|What causes|"
    "What are the effects of",
    "list": "List five|Give me ten|What are some|Name three|Suggest a few|Make a list of|"
    "What are the advantages and disadvantages of|Write step-by-step instructions for",
    "summarise": "Summarize the following passage:|Summarize this article in two sentences:|"
    "Write a short summary of this text:|What is the main point of this news report?\n\n|"
    "Shorten the following paragraph:|Give the key points of this story:\n\n",
    "read": "Read the passage and answer the question.\n\nPassage:|"
    "Answer from this text only.\n\nText:|Use the documents below to answer.\n\nDocument 1:|"
    "Here is a paragraph:\n\n|Given this context, answer the question at its end.\n\nContext:",
    "fact": "Who was the first|When was the|Where is the|Which country|What is the capital of|"
    "How many|Who wrote|What year did|What is the name of|Is it true that",
    "translate": "Translate into German:|Translate into English:|"
    "Translate this sentence to French:|How do you say in Spanish|"
    "Translate from German to English:|What does this French phrase mean:",
    "calculate": "Calculate|What is the sum of|A shop sells|A train|Tom has|Solve for x:|"
    "Each of the|If a car|Maria buys|What is the area of|The price of|How much does it cost if",
    "code": "Write a Python function that|Write a C++ program that|What does this code do?\n\n|"
    "Fix the error in this code:\n\n|Write a SQL query that|Write a JavaScript function to|"
    "Implement an algorithm that|Explain this Python code:\n\n",
    "write": "Write a short story about|Write an email to|Write a poem about|"
    "Rewrite this sentence:|Write an introduction for|Draft a letter|"
    "Write a product description for|Imagine that you are",
    "converse": "Hi! I|I feel|Can you help me|My friend|I want to learn|What do you think about|"
    "I have a problem with|Could you tell me|I am planning|What should I do if|Let's talk about",
    "judge": "Is the following statement positive or negative?|Which of these is correct?|"
    "Sort the following|Compare|Extract the names from this text:|Put these words into groups:",
}
KINDS = {kind: openings.split("|") for kind, openings in KINDS.items()}
