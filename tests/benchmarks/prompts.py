"""Ten hand-written prompts of different kinds."""

PROMPTS = {
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "list": "List ten animals that live in the sea.",
    "story": "Tell a short story about a lighthouse keeper and a lost ship.",
    "maths": "A train travels 60 miles in 1.5 hours. What is its average speed? Explain.",
    "translation": "Translate into French: Good morning, how are you today?",
    "explanation": "Explain why the sky is blue.",
    "email": "Write a polite email asking a colleague to move a meeting to Friday.",
    "summary": "Summarise the plot of Romeo and Juliet in three sentences.",
    "advice": "How can I sleep better at night?",
    "facts": "What are the planets of the solar system, in order?",
}
