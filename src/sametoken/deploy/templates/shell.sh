{% for name in secrets %}
# Set {{ name | safe }} to the API key first.
{% endfor %}
{% include "files.sh" %}
{{ words | lines }}
