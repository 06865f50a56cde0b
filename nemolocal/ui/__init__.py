"""The page: what a person sees in the browser. Only this package imports gradio, which takes seconds,
so nothing outside imports this package before the page is wanted. It must not know the port (`api`)."""
