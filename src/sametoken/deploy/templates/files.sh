{% for name, text in files.items() %}
cat > {{ name }} <<'END'
{{ text | safe }}END
{% endfor %}
