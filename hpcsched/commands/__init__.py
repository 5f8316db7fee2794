"""What hsub, hqueue and hcancel do, by either name: words in, requests to the API and text out."""
